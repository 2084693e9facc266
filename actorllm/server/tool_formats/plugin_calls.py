"""Parsers of tool calls with vLLM's interface, as parsers of ours: `adapted` makes a subclass of `ToolParser` of one.

A whole answer goes through `extract_tool_calls`, a stream through `extract_tool_calls_streaming`; where a class has no streams, the
text is held back until its end. Calls that are demanded are written and read as a JSON list, as in vLLM. Loaded by name, where a
parser is one (`tool_parsers.parser_named`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from actorllm.server.tool_parsers import Arguments, Piece, PythonicParser, Text, Tool, ToolCallStart, ToolParser
from actorllm.text.plugin_classes.deltas import AskedFields
from actorllm.text.plugin_classes.seen_text import SeenText
from actorllm.text.reasoning.plugin_reasoning import made, usable_tokenizer


def adapted(plugin: type) -> type[ToolParser] | None:
    """A parser of ours that asks this class; None: it has another interface."""
    if not hasattr(plugin, "extract_tool_calls"):
        return None
    return type(plugin.__name__, (PluginCalls,), {"PLUGIN": plugin, "__doc__": plugin.__doc__})


class PluginCalls(ToolParser):
    """Of one sequence."""

    DEMANDED = PythonicParser
    PLUGIN: ClassVar[type]
    TOKENIZER: ClassVar[Any] = None

    def __init__(self, names: Collection[str], asked: AskedFields | None = None) -> None:
        """asked: the request."""
        super().__init__(names)
        self._asked = AskedFields() if asked is None else asked
        self._plugin = made(self.PLUGIN, self.TOKENIZER, tools=self._asked.tools)
        self._seen = SeenText(self.TOKENIZER)
        self._told: dict[int, str] = {}
        """Of each call that has begun, the arguments so far."""

    @classmethod
    def for_folder(cls, folder: str | None) -> type[ToolParser]:
        tokenizer = usable_tokenizer("tool_call_parser", cls.PLUGIN, folder)
        return type(cls.__name__, (cls,), {"TOKENIZER": tokenizer, "__doc__": cls.__doc__})

    @classmethod
    def for_request(cls, names: Collection[str], body: Any) -> ToolParser:
        return cls(names, None if body is None else AskedFields.of(body))

    def see(self, token_ids: Sequence[int], is_whole: bool) -> None:
        self._seen.see(token_ids, is_whole)

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        delta = self._seen.streamed(text, self._plugin.extract_tool_calls_streaming, self._asked)
        if delta is None:
            return []
        pieces: list[Piece] = [Text(delta.content)] if delta.content else []
        for call in delta.tool_calls or ():
            pieces += self._of_delta(call)
        return pieces

    def _of_delta(self, call: Any) -> list[Piece]:
        """More of a call, whose number is its place among those that have begun."""
        function = call.function if isinstance(call.function, Mapping) else vars(call.function or object())
        name, arguments = function.get("name"), function.get("arguments")
        pieces: list[Piece] = []
        if name and call.index not in self._told:
            pieces.append(ToolCallStart(self.num_calls, name, call.id))
            self._told[call.index] = ""
            self.num_calls += 1
        if arguments and call.index in self._told:
            pieces.append(Arguments(list(self._told).index(call.index), arguments))
            self._told[call.index] += arguments
        return pieces

    def finish(self) -> list[Piece]:
        if not self._seen.is_held:
            return self._unstreamed()
        text = self._seen.text
        if not text:
            return []
        found = self._plugin.extract_tool_calls(text, self._asked)
        if not found.tools_called:
            return [Text(text if found.content is None else found.content)]
        pieces: list[Piece] = [Text(found.content)] if found.content else []
        for call in found.tool_calls:
            pieces.append(ToolCallStart(self.num_calls, call.function.name, call.id))
            pieces.append(Arguments(self.num_calls, call.function.arguments))
            self.num_calls += 1
        return pieces

    def _unstreamed(self) -> list[Piece]:
        """What a class knows of the last call's arguments and has not told, as vLLM sends it at the end of a stream."""
        known = getattr(self._plugin, "prev_tool_call_arr", None)
        if not known or not self._told or len(known) != len(self._told):
            return []
        arguments = known[-1].get("arguments", {})
        whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        told = self._told[max(self._told)]
        if not whole.startswith(told) or whole == told:
            return []
        return [Arguments(self.num_calls - 1, whole[len(told) :])]

    def _advance(self, pieces: list[Piece]) -> bool:
        return False

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        return PythonicParser.tag(tools, is_single=is_single)
