"""Calls of gpt-oss, as messages to a function; thoughts are told of as well, since one reader has both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from actorllm.server.tool_parsers import Arguments, Piece, Text, Tool, ToolCallStart, ToolParser, schema_of, several
from actorllm.text.reasoning.harmony import FINAL, CallBegun, CallPart, HarmonyPart, HarmonyReader
from actorllm.text.reasoning.parsers import Thought

THOUGHT_BEGIN = "<|channel|>analysis<|message|>"
THOUGHT_END = "<|end|><|start|>assistant"


class HarmonyParser(ToolParser):
    """gpt-oss: <|channel|>commentary to=functions.name <|constrain|>json<|message|>, and the arguments."""

    READS_THOUGHTS = True

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._reader = HarmonyReader()
        self._has_arguments = True

    def push(self, text: str) -> list[Piece]:
        return self._told(self._reader.push(text))

    def finish(self) -> list[Piece]:
        pieces = self._told(self._reader.finish())
        self._complete(pieces)
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        return False

    def _told(self, parts: list[HarmonyPart]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            match part:
                case CallBegun(name):
                    self._complete(pieces)
                    pieces.append(ToolCallStart(self.num_calls, name))
                    self.num_calls += 1
                    self._has_arguments = False
                case CallPart(text):
                    pieces.append(Arguments(self.num_calls - 1, text))
                    self._has_arguments = True
                case Thought():
                    pieces.append(part)
                case _:
                    pieces.append(Text(part.text))
        return pieces

    def _complete(self, pieces: list[Piece]) -> None:
        """A call without arguments has none."""
        if not self._has_arguments:
            pieces.append(Arguments(self.num_calls - 1, "{}"))
            self._has_arguments = True

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        """A thought may come before the calls: it is part of the grammar."""
        tags = [
            {
                "type": "tag",
                "begin": f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>",
                "content": schema_of(tool),
                "end": "<|call|>",
            }
            for tool in tools
        ]
        return _with_thought(several(tags, "<|start|>assistant", is_single))

    @classmethod
    def answer_tag(cls, format: dict[str, Any]) -> dict[str, Any]:
        return _with_thought({"type": "tag", "begin": FINAL, "content": format, "end": ""})


def _with_thought(format: dict[str, Any]) -> dict[str, Any]:
    """The same behind a thought, or without one."""
    thought = {"type": "tag", "begin": THOUGHT_BEGIN, "content": {"type": "any_text"}, "end": THOUGHT_END}
    return {"type": "or", "elements": [format, {"type": "sequence", "elements": [thought, format]}]}
