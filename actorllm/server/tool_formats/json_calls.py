"""Calls as JSON objects, or lists of them, behind a marker: Granite, InternLM, Jamba, Phi 4."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from actorllm.server.tool_parsers import (
    CallList,
    MarkedParser,
    Piece,
    Text,
    Tool,
    json_call,
    several,
)
from actorllm.text.markers import overlap


class JsonCallsParser(MarkedParser):
    """A marker, JSON, and where the format has one, a marker of the end."""

    OTHER_MARKERS: ClassVar[tuple[str, ...]] = ()
    """That mean the same."""
    BEGIN: ClassVar[str] = "["
    """What a demanded call has before its object."""
    END: ClassVar[str] = ""
    """Of the calls; empty: that of the JSON."""
    ARGUMENTS: ClassVar[str] = "arguments"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._list = CallList(0, None)

    def _first_marker(self) -> tuple[str, str, str]:
        found = [self._buffer.partition(marker) for marker in (self.MARKER, *self.OTHER_MARKERS)]
        first = min(found, key=lambda parts: len(parts[0]))
        if first[1]:
            self._marker = first[1]
        return first

    def _num_held(self) -> int:
        return max(overlap(self._buffer, marker) for marker in (self.MARKER, *self.OTHER_MARKERS))

    def _in_call(self, pieces: list[Piece]) -> bool:
        if self._state == "marked":
            self._list = CallList(self.num_calls, None)
            self._state = "list"
        if self._state == "list":
            found, self._buffer = self._list.push(self._buffer)
            pieces += found
            self.num_calls = self._list.num_calls
            if self._list.is_none:
                return self._give_up(("" if self._list.has_begun else self._marker) + self._list.untold, pieces)
            if self._list.is_done:
                self._state = "end" if self.END else "text"
            return self._list.is_done
        bare = self._buffer.lstrip()
        if len(bare) < len(self.END) and self.END.startswith(bare):
            return False
        if bare.startswith(self.END):
            self._buffer = bare[len(self.END) :]
        self._state = "text"
        return True

    def _finish_call(self, held: str) -> list[Piece]:
        if self._state == "end":
            return [Text(held)] if held.strip() and not self.END.startswith(held.strip()) else []
        if self._state == "list" and self._list.has_begun:
            return [Text(self._list.untold)] if self._list.untold else []
        return [Text(self._marker + (self._list.untold if self._state == "list" else "") + held)]

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        close = "}" + ("]" if cls.BEGIN.strip() else "") + cls.END
        begin, middle = cls.MARKER + cls.BEGIN + '{"name": ', f', "{cls.ARGUMENTS}": '
        return several([json_call(tool, begin, middle, close) for tool in tools], "\n", is_single)


class GraniteParser(JsonCallsParser):
    """Granite 3: <|tool_call|> or <tool_call>, and a list."""

    MARKER = "<|tool_call|>"
    OTHER_MARKERS = ("<tool_call>",)


class InternLMParser(JsonCallsParser):
    """InternLM 2: an object between markers of an action."""

    MARKER = "<|action_start|><|plugin|>"
    BEGIN = "\n"
    END = "<|action_end|>"
    ARGUMENTS = "parameters"


class JambaParser(JsonCallsParser):
    """Jamba and Hunyuan: <tool_calls> and </tool_calls> around a list."""

    MARKER = "<tool_calls>"
    END = "</tool_calls>"


class Phi4Parser(JsonCallsParser):
    """Phi 4 mini: functools and a list."""

    MARKER = "functools"

    def _first_marker(self) -> tuple[str, str, str]:
        before, marker, after = self._buffer.partition("functools[")
        return before, marker and self.MARKER, "[" + after if marker else after

    def _num_held(self) -> int:
        return overlap(self._buffer, "functools[")
