"""Calls in a section of special tokens, with the name before the arguments: DeepSeek V3 and V3.1, Kimi K2."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from actorllm.server.tool_parsers import (
    MAX_NAME,
    Arguments,
    MarkedParser,
    Piece,
    Text,
    Tool,
    ToolCallStart,
    schema_of,
    several,
)
from actorllm.text.markers import overlap


class SectionParser(MarkedParser):
    """MARKER, then for each call CALL, its name, HEAD_END, its arguments and CALL_END; then END."""

    CALL: ClassVar[str]
    HEAD_END: ClassVar[str]
    """Behind the name."""
    CALL_END: ClassVar[str]
    END: ClassVar[str]
    FENCE: ClassVar[str] = ""
    """What may stand between the arguments and CALL_END beside space."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._has_arguments = False

    @classmethod
    def name_of(cls, head: str) -> tuple[str, str | None]:
        """Name and id; the name is empty where there is none."""
        return head.strip(), None

    @classmethod
    def head_of(cls, name: str, number: int) -> str:
        """What `name_of` takes, of a call that is demanded."""
        return name

    def _in_call(self, pieces: list[Piece]) -> bool:
        match self._state:
            case "marked":
                return self._between(self.CALL, self.END, "head", pieces)
            case "head":
                return self._head(pieces)
        return self._arguments(pieces)

    def _head(self, pieces: list[Piece]) -> bool:
        window = self._buffer[: 2 * MAX_NAME]
        head, end, _ = window.partition(self.HEAD_END)
        name, id = self.name_of(head) if end else ("", None)
        if end and name:
            self._buffer = self._buffer[len(head) + len(end) :]
            pieces.append(ToolCallStart(self.num_calls, name, id))
            self.num_calls += 1
            self._state, self._has_arguments = "arguments", False
            return True
        if not end and len(window) < 2 * MAX_NAME:
            return False
        raw = window if not end else head + end
        self._buffer = self._buffer[len(raw) :]
        return self._give_up(("" if self.num_calls else self.MARKER) + self.CALL + raw, pieces)

    def _arguments(self, pieces: list[Piece]) -> bool:
        """All up to the end of the call, as it is written; the space around it and the fence are left out."""
        part, end, after = self._buffer.partition(self.CALL_END)
        if not end:
            part = part[: len(part) - overlap(part, self.CALL_END)]
        told = part if self._has_arguments else part.lstrip()
        kept = told.rstrip()
        if self.FENCE:
            kept = kept.removesuffix(self.FENCE).rstrip() if end else kept.rstrip(self.FENCE[0]).rstrip()
        if kept:
            pieces.append(Arguments(self.num_calls - 1, kept))
            self._has_arguments = True
        if not end:
            gone = len(part) - len(told) + len(kept)
            self._buffer = self._buffer[gone:]
            return False
        if not self._has_arguments:
            pieces.append(Arguments(self.num_calls - 1, "{}"))
        self._buffer, self._state = after, "marked"
        return True

    def _finish_call(self, held: str) -> list[Piece]:
        if self._state == "arguments":
            held = held[: len(held) - overlap(held, self.CALL_END)].rstrip()
            if self.FENCE:
                held = held.removesuffix(self.FENCE).rstrip()
            return [Arguments(self.num_calls - 1, held)] if held else []
        if self._state == "marked" and self.num_calls:
            return []
        call = self.CALL if self._state == "head" else ""
        return [Text(("" if self.num_calls else self.MARKER) + call + held)]

    def _give_out(self, pieces: list[Piece]) -> None:
        if self._state != "arguments":
            return super()._give_out(pieces)
        held, self._buffer = self._buffer, ""  # space within the arguments
        pieces.append(Arguments(self.num_calls - 1, held))
        self._has_arguments = True
        return None

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        end = cls.FENCE and "\n" + cls.FENCE
        tags = [
            {
                "type": "tag",
                "begin": cls.MARKER + cls.CALL + cls.head_of(tool.name, number) + cls.HEAD_END,
                "content": schema_of(tool),
                "end": end + cls.CALL_END + cls.END,
            }
            for number, tool in enumerate(tools)
        ]
        return several(tags, "", is_single)


class DeepSeekV31Parser(SectionParser):
    """DeepSeek V3.1: the name, a separator, JSON."""

    MARKER = "<｜tool▁calls▁begin｜>"
    CALL = "<｜tool▁call▁begin｜>"
    HEAD_END = "<｜tool▁sep｜>"
    CALL_END = "<｜tool▁call▁end｜>"
    END = "<｜tool▁calls▁end｜>"


class DeepSeekV3Parser(DeepSeekV31Parser):
    """DeepSeek V3 and R1: the kind of the call, a separator, the name, and JSON in a fence."""

    HEAD_END = "\n```json\n"
    FENCE = "```"
    SEPARATOR = "<｜tool▁sep｜>"

    @classmethod
    def name_of(cls, head: str) -> tuple[str, str | None]:
        _, separator, name = head.partition(cls.SEPARATOR)
        return name.strip() if separator else "", None

    @classmethod
    def head_of(cls, name: str, number: int) -> str:
        return f"function{cls.SEPARATOR}{name}"


class KimiK2Parser(SectionParser):
    """Kimi K2: an id that names the function, as functions.name:0, and JSON."""

    MARKER = "<|tool_calls_section_begin|>"
    CALL = "<|tool_call_begin|>"
    HEAD_END = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"
    END = "<|tool_calls_section_end|>"

    @classmethod
    def name_of(cls, head: str) -> tuple[str, str | None]:
        id = head.strip()
        return id.partition(":")[0].removeprefix("functions."), id

    @classmethod
    def head_of(cls, name: str, number: int) -> str:
        return f"functions.{name}:{number}"
