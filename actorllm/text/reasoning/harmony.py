"""OpenAI's harmony format (gpt-oss): messages with a channel each, for thoughts, answers and calls.

The prompt ends with the beginning of a message, so an output begins with its header. `HarmonyReader` is used by two parsers:
`HarmonyReasoning` for answers without tools, and `server.tool_formats.harmony` for those with.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from actorllm.text.markers import overlap
from actorllm.text.reasoning.parsers import Part, ReasoningParser, Said, Thought

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
FINAL = f"{CHANNEL}final{MESSAGE}"
MAX_HEAD = 512
"""Characters of the header of a message."""
PORTION = 4096
"""Characters that are read at a time: what is left of a text is copied for each message in it."""
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class CallBegun(NamedTuple):
    """A call of this function."""

    name: str


class CallPart(NamedTuple):
    """Part of its arguments."""

    text: str


HarmonyPart: TypeAlias = Part | CallBegun | CallPart


class HarmonyReader:
    """The messages in the text of one sequence. A text that is not in this format is what is said."""

    def __init__(self) -> None:
        self._buffer = ""
        self._state = "begin"

    @property
    def is_within_thought(self) -> bool:
        """Whether nothing is held back of a message that is a thought."""
        return self._state == "thought" and not self._buffer

    def push(self, text: str) -> list[HarmonyPart]:
        parts: list[HarmonyPart] = []
        for at in range(0, len(text), PORTION):
            self._buffer += text[at : at + PORTION]
            while self._buffer and self._advance(parts):
                pass
        return parts

    def finish(self) -> list[HarmonyPart]:
        held, self._buffer = self._buffer, ""
        match self._state:
            case "begin" | "plain":
                return [Said(held)] if held else []
            case "head" | "between":
                return []
        held = held[: len(held) - max(overlap(held, mark) for mark in BODY_ENDS)]
        return [self._part(held)] if held else []

    def _advance(self, parts: list[HarmonyPart]) -> bool:
        match self._state:
            case "begin":
                return self._begin()
            case "head":
                return self._head(parts)
            case "between":
                return self._between()
            case "plain":
                parts.append(Said(self._buffer))
                self._buffer = ""
                return False
        return self._body(parts)

    def _begin(self) -> bool:
        """Whether the output begins with a header."""
        bare = self._buffer.lstrip()
        heads = (CHANNEL, START, MESSAGE, "to=")
        if any(bare.startswith(head) for head in heads):
            self._state = "head"
        elif len(self._buffer) < MAX_HEAD and any(head.startswith(bare) for head in heads):
            return False
        else:
            self._state = "plain"
        return True

    def _between(self) -> bool:
        """Up to the next message."""
        _, start, after = self._buffer.partition(START)
        if not start:
            self._buffer = self._buffer[len(self._buffer) - overlap(self._buffer, START) :]
            return False
        self._buffer, self._state = after, "head"
        return True

    def _head(self, parts: list[HarmonyPart]) -> bool:
        window = self._buffer[:MAX_HEAD]
        head, message, _ = window.partition(MESSAGE)
        if not message and len(window) < MAX_HEAD:
            return False
        if not message:
            self._state = "plain"
            return True
        self._buffer = self._buffer[len(head) + len(message) :]
        recipient, channel = RECIPIENT.search(head), NAME.search(head)
        if recipient is not None and recipient[1] not in ("assistant", "all"):
            parts.append(CallBegun(recipient[1].removeprefix("functions.")))
            self._state = "call"
        else:
            self._state = "thought" if channel is not None and channel[1] == "analysis" else "said"
        return True

    def _body(self, parts: list[HarmonyPart]) -> bool:
        found = [(place, mark) for mark in BODY_ENDS if (place := self._buffer.find(mark)) >= 0]
        place, mark = min(found, default=(-1, ""))
        if not mark:
            held = max(overlap(self._buffer, one) for one in BODY_ENDS)
            place = len(self._buffer) - held
        if place:
            parts.append(self._part(self._buffer[:place]))
        self._buffer = self._buffer[place:] if mark in ("", START) else self._buffer[place + len(mark) :]
        if mark:
            self._state = "between"
        return bool(mark)

    def _part(self, text: str) -> HarmonyPart:
        match self._state:
            case "thought":
                return Thought(text)
            case "call":
                return CallPart(text)
        return Said(text)


class HarmonyReasoning(ReasoningParser):
    """Of an answer without tools: the analysis is thought, other channels are said, calls are said as they are written."""

    START = f"{CHANNEL}analysis{MESSAGE}"
    END = FINAL
    FORCED = f"<|end|><|start|>assistant{FINAL}"
    IS_ASSUMED = True

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        self._reader = HarmonyReader()

    @property
    def is_over(self) -> bool:
        return False

    def is_all_thought(self, text: str) -> bool:
        return self._reader.is_within_thought and "<" not in text

    def push(self, text: str) -> list[Part]:
        return self._told(self._reader.push(text))

    def finish(self) -> list[Part]:
        return self._told(self._reader.finish())

    @staticmethod
    def _told(parts: list[HarmonyPart]) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            match part:
                case CallBegun(name):
                    told.append(Said(f"to=functions.{name} "))
                case CallPart(text):
                    told.append(Said(text))
                case _:
                    told.append(part)
        return told
