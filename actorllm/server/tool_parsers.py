"""Tool calls in what a model writes: a parser for each way in which models write them.

A parser gets the text of one sequence as it comes and gives out pieces. A piece is text for the reader, the beginning of a call
with the name of its function, or a part of its arguments. A whole answer goes the same way, so it says the same as a stream.
Arguments are passed on as they are written, without being understood. A call is told of when it is certain. Where a marker
announces it, that is with its name and the beginning of its arguments. Where nothing does, its name must be that of a tool, and
its arguments an object. The reason is that an answer in JSON begins as a call does. What turns out to be none is text again.
`tag` is the other direction: the structural tag (`text.structural_tag`) with which a call is demanded.

What is held back is bounded (`MAX_HELD`), and read once. More is text. The bound counts characters since the last piece, so a
text that is cut elsewhere gives the same pieces. More formats are in `tool_formats`; users name their own as 'module:Class'.

Pure; called by server.tools and server.message_parts. Names are vLLM's.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from actorllm.server.random_names import random_name
from actorllm.server.tool_formats import FORMATS
from actorllm.text.markers import overlap
from actorllm.text.reasoning.parsers import Thought
from actorllm.types.named_class import named_class

MAX_HELD = 64 << 10
"""Characters that a parser holds back at most, until it is known what they are."""
PORTION = 4096
"""Characters that are read at a time: what is left of a text is copied for each call in it."""
MAX_NAME = 256
"""Characters of the name of a function, where nothing else bounds it."""


class Text(NamedTuple):
    """For the reader."""

    text: str


class ToolCallStart(NamedTuple):
    """A call begins: the number-th of this answer, from 0."""

    number: int
    name: str
    id: str | None = None
    """That the model has given it; None: it has none."""


class Arguments(NamedTuple):
    """More of the arguments of a call, as JSON text."""

    number: int
    text: str


Piece: TypeAlias = Text | ToolCallStart | Arguments | Thought


class Tool(NamedTuple):
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments."""


# Parts of JSON --------------------------------------------------------------------------------------------------------


class Value:
    """Finds the end of one JSON value, character by character."""

    __slots__ = ("_depth", "_has_begun", "_is_escaped", "_quote")

    OPENING: ClassVar[str] = "{["
    CLOSING: ClassVar[str] = "}]"
    QUOTES: ClassVar[str] = '"'

    def __init__(self) -> None:
        self._depth = 0
        self._has_begun = self._is_escaped = False
        self._quote = ""
        """That of the string it is in."""

    def end(self, text: str, at: int) -> tuple[int, bool]:
        """How far it goes in the text from `at` on, and whether it ends there."""
        while at < len(text):
            char = text[at]
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
                    if not self._depth:
                        return at + 1, True
            elif char in self.QUOTES:
                self._quote, self._has_begun = char, True
            elif char in self.OPENING:
                self._depth += 1
                self._has_begun = True
            elif char in self.CLOSING:
                if not self._depth:
                    return at, True  # of what this value is in
                self._depth -= 1
                if not self._depth:
                    return at + 1, True
            elif not self._depth and (char == "," or (char.isspace() and self._has_begun)):
                return at, True
            elif not char.isspace():
                self._has_begun = True
            at += 1
        return at, False


class PythonValue(Value):
    """The same of a Python expression in brackets."""

    __slots__ = ()

    OPENING = "{[("
    CLOSING = "}])"
    QUOTES = "\"'"


class Kept:
    """Text that grows, without a copy of it for each part."""

    __slots__ = ("_parts", "size")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.size = 0

    def add(self, part: str) -> None:
        self._parts.append(part)
        self.size += len(part)

    @property
    def text(self) -> str:
        return "".join(self._parts)


NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")


class CallObject:
    """One call as a JSON object with a name and arguments, as its text comes.

    Done when its last brace is there; `is_none` when it turns out to be another object. What else is in it, once the call
    has been told of, is left out.
    """

    def __init__(self, number: int, names: Collection[str] | None) -> None:
        """names: of the tools; the object is a call if it has one of them, and an object as its arguments. None: a marker has
        announced a call, and any name will do, also without arguments."""
        self.number = number
        self._read = Kept()
        self.is_done = self.is_none = False
        self.has_begun = False
        """The call has been told of."""
        self._names = names
        self._state = "open"  # open, before key, key, colon, before value, value, comma
        self._key = ""
        self._value = Value()
        self._held = ""  # of the present key or value
        self._name: str | None = None
        self._arguments: str | None = None  # as far as they have not been told of

    def push(self, text: str) -> tuple[list[Piece], str]:
        """The pieces, and what is left of the text when the object is done."""
        pieces: list[Piece] = []
        at = 0
        while at < len(text) and not self.is_done and not self.is_none:
            if self.has_begun:
                at = self._step(text, at, pieces)
                continue
            # Until it is told of, all of it is kept, and that has a bound.
            end = self._step(text[: at + MAX_HELD - self._read.size], at, pieces)
            self._read.add(text[at:end])
            at = end
            self.is_none |= self._read.size >= MAX_HELD and not self.has_begun
        if self.is_done and not self.has_begun:
            self.is_none = True
        return pieces, text[at:]

    @property
    def raw(self) -> str:
        """What was read, until it was told of."""
        return self._read.text

    def _step(self, text: str, at: int, pieces: list[Piece]) -> int:
        char = text[at]
        # Keys and values are taken in pieces, however the text is cut; all else is one character.
        if self._state in ("key", "value"):
            end, is_over = self._value.end(text, at)
            part = text[at:end]
            # Arguments are streamed. Other values are needed whole.
            if self._state == "value" and self._key in ARGUMENT_KEYS:
                if part:
                    self._arguments = (self._arguments or "") + part
                    self._tell(pieces)
            elif not self.has_begun:
                self._held += part
            if is_over:
                self._end_part(pieces)
            return end
        if char.isspace():
            return at + 1
        match self._state, char:
            case "open", "{":
                self._state = "before key"
            # The end of the object. Without a list of names, a call may have no arguments.
            case (("before key" | "comma"), "}"):
                self.is_done = True
                if self._arguments is None and self._names is None:
                    self._arguments = "{}"
                    self._tell(pieces)
            case "before key", '"':
                self._state, self._value, self._held = "key", Value(), ""
                return at
            case "colon", ":":
                self._state = "before value"
            # With names to go by, arguments must be an object: else the answer is JSON of another kind.
            case "before value", _:
                self._state, self._value, self._held = "value", Value(), ""
                if self._key in ARGUMENT_KEYS:
                    self._arguments = None
                    self.is_none = self._names is not None and char != "{"
                return at
            case "comma", ",":
                self._state = "before key"
            case _:
                self.is_none = True
                return at
        return at + 1

    def _tell(self, pieces: list[Piece]) -> None:
        """Of the call, as soon as its name is known and its arguments have begun."""
        if self._name is None or self._arguments is None:
            return
        if not self.has_begun:
            pieces.append(ToolCallStart(self.number, self._name))
            self.has_begun = True
        if self._arguments:
            pieces.append(Arguments(self.number, self._arguments))
            self._arguments = ""

    def _end_part(self, pieces: list[Piece]) -> None:
        """A key or a value is complete."""
        if self._state == "key":
            self._key = "" if self.has_begun else _string(self._held) or ""
            self.is_none = not self.has_begun and self._key not in (*NAME_KEYS, *ARGUMENT_KEYS, *OTHER_KEYS)
            self._state = "colon"
            return
        self._state = "comma"
        if self._key in NAME_KEYS and not self.has_begun:
            self._name = _string(self._held)
            self.is_none = not self._name or (self._names is not None and self._name not in self._names)
            if not self.is_none:
                self._tell(pieces)


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


# Parsers --------------------------------------------------------------------------------------------------------------


class ToolParser(ABC):
    """Of one sequence. `push` as text comes, then `finish`."""

    MARKER: ClassVar[str] = ""
    """What a call begins with; empty: nothing by which it could be told from text in advance."""
    READS_THOUGHTS: ClassVar[bool] = False
    """It tells of thoughts itself: one format has both."""

    DEMANDED: ClassVar[type[ToolParser] | None] = None
    """What reads calls that a grammar demands; None: the parser itself."""

    def __init__(self, names: Collection[str]) -> None:
        """names: of the tools; a mapping has the schemas of their arguments."""
        self.num_calls = 0
        self._names = names
        self._buffer = ""

    @classmethod
    def for_folder(cls, folder: str | None) -> type[ToolParser]:
        """The same for the tokenizer in this folder, for a parser that asks it. Reads files."""
        return cls

    @classmethod
    def for_request(cls, names: Collection[str], body: Any) -> ToolParser:
        """A parser for one sequence. names: as of the constructor. body: of the request."""
        return cls(names)

    def see(self, token_ids: Sequence[int], is_whole: bool) -> None:  # noqa: B027
        """Called before a `push` with the ids of its text, for a parser that looks at them. is_whole: no other text comes."""

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while at < len(text):
            end = min(at + PORTION, at + MAX_HELD + 1 - len(self._buffer))
            self._buffer += text[at:end]
            at = end
            while self._buffer and self._advance(pieces):
                pass
            if len(self._buffer) > MAX_HELD:
                self._give_out(pieces)
        return pieces

    def _give_out(self, pieces: list[Piece]) -> None:
        """So much is held back that it is no call."""
        held, self._buffer = self._buffer, ""
        pieces.append(Text(held))

    @abstractmethod
    def _advance(self, pieces: list[Piece]) -> bool:
        """Take something from the buffer. False: there is to be more of it first."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """What was held back."""

    @classmethod
    @abstractmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        """The format of an answer that is calls of these and nothing else; of one call, or one and more."""

    @classmethod
    def answer_tag(cls, format: dict[str, Any]) -> dict[str, Any]:
        """The format of an answer that is no call."""
        return format

    @staticmethod
    def new_id() -> str:
        return f"chatcmpl-tool-{random_name()}"


class MarkedParser(ToolParser):
    """Of models that write a marker before each call."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._state = "text"
        self._marker = self.MARKER
        """What the call, or the section of calls, has begun with."""
        self._is_behind_call = False
        """Nothing but space has come since."""

    def _advance(self, pieces: list[Piece]) -> bool:
        if self._state == "text":
            return self._text(pieces)
        goes_on = self._in_call(pieces)
        if self._state == "text":
            self._is_behind_call = not (pieces and isinstance(pieces[-1], Text))
        return goes_on

    @abstractmethod
    def _in_call(self, pieces: list[Piece]) -> bool: ...

    def _give_out(self, pieces: list[Piece]) -> None:
        held, self._buffer = self._buffer, ""
        pieces += [Text(held)] if self._state == "text" else self._finish_call(held)
        self._state, self._is_behind_call = "text", False

    def _text(self, pieces: list[Piece]) -> bool:
        """Text up to the next marker. Between calls there is nothing but space."""
        before, marker, after = self._first_marker()
        held = "" if marker else self._buffer[len(self._buffer) - self._num_held() :]
        if not marker:
            before = before[: len(before) - len(held)]
        if self._is_behind_call and not before.strip():
            held = held if marker else before + held
            before = ""
        if before:
            pieces.append(Text(before))
            self._is_behind_call = False
        self._buffer = after if marker else held
        if marker:
            self._state = "marked"
        return bool(marker)

    def _first_marker(self) -> tuple[str, str, str]:
        """The buffer around it, as `str.partition`."""
        return self._buffer.partition(self.MARKER)

    def _num_held(self) -> int:
        """Characters at the end of the buffer that may begin a marker."""
        return overlap(self._buffer, self.MARKER)

    def _between(self, call: str, end: str, state: str, pieces: list[Piece]) -> bool:
        """In a section of calls: the next call, with which `state` begins, the section's end, or what belongs to neither."""
        bare = self._buffer.lstrip()
        if bare.startswith(call):
            self._buffer, self._state = bare[len(call) :], state
        elif bare.startswith(end):
            self._buffer, self._state = bare[len(end) :], "text"
        elif any(marker.startswith(bare) for marker in (call, end)):
            return False
        else:
            raw = "" if self.num_calls else self._marker + self._buffer[: len(self._buffer) - len(bare)]
            self._buffer = bare
            return self._give_up(raw, pieces)
        return True

    def _give_up(self, raw: str, pieces: list[Piece]) -> bool:
        """It was no call."""
        if raw:
            pieces.append(Text(raw))
        self._state = "text"
        return bool(self._buffer)

    def finish(self) -> list[Piece]:
        held, self._buffer = self._buffer, ""
        if self._state != "text":
            return self._finish_call(held)
        return [Text(held)] if held.strip() or (held and not self._is_behind_call) else []

    @abstractmethod
    def _finish_call(self, held: str) -> list[Piece]: ...


class HermesParser(MarkedParser):
    """Hermes, Qwen 2.5 and 3: <tool_call> and </tool_call> around a JSON object."""

    MARKER = "<tool_call>"
    END = "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._object = CallObject(0, None)

    def _in_call(self, pieces: list[Piece]) -> bool:
        if self._state == "marked":
            self._object = CallObject(self.num_calls, None)
            self._state = "object"
        if self._state == "object":
            found, self._buffer = self._object.push(self._buffer)
            pieces += found
            self.num_calls += any(isinstance(piece, ToolCallStart) for piece in found)
            if self._object.is_none and not self._object.has_begun:
                return self._give_up(self.MARKER + self._object.raw, pieces)
            if self._object.is_done or self._object.is_none:
                self._state = "end"
            return self._state == "end"
        _, end, after = self._buffer.partition(self.END)
        if not end:
            return False
        self._buffer, self._state = after, "text"
        return True

    def _finish_call(self, held: str) -> list[Piece]:
        if self._state == "end":
            return [Text(held)] if held.strip() and not self.END.startswith(held.strip()) else []
        if self._state == "object" and self._object.has_begun:
            return []
        raw = self._object.raw if self._state == "object" else ""
        return [Text(self.MARKER + raw + held)]

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        tags = [json_call(tool, cls.MARKER + '\n{"name": ', ', "arguments": ', "}\n" + cls.END) for tool in tools]
        return several(tags, "\n", is_single)


class MistralParser(MarkedParser):
    """Mistral: [TOOL_CALLS] before a JSON list of calls, or (since 2025) before each name, with [ARGS] behind it."""

    MARKER = "[TOOL_CALLS]"
    NAME_END = re.compile(r"\[CALL_ID\]|\[ARGS\]|\{")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._list = CallList(0, None)
        self._value = Value()

    def _in_call(self, pieces: list[Piece]) -> bool:
        if self._state == "marked":
            bare = self._buffer.lstrip()
            if not bare:
                return False
            self._list = CallList(self.num_calls, None)
            self._state = "list" if bare[0] in "[{" else "name"
        if self._state == "list":
            found, self._buffer = self._list.push(self._buffer)
            pieces += found
            self.num_calls = self._list.num_calls
            if self._list.is_none:
                return self._give_up(("" if self._list.has_begun else self.MARKER) + self._list.untold, pieces)
            if self._list.is_done:
                self._state = "text"
            return self._list.is_done
        if self._state == "name":
            return self._name(pieces)
        end, is_over = self._value.end(self._buffer, 0)
        if end:
            pieces.append(Arguments(self.num_calls - 1, self._buffer[:end]))
        self._buffer = self._buffer[end:]
        if is_over:
            self._state = "text"
        return is_over

    def _name(self, pieces: list[Piece]) -> bool:
        head = self._buffer[: 2 * MAX_NAME]
        found, start = self.NAME_END.search(head), re.search(r"\[ARGS\]|\{", head)
        if found is None or start is None:
            if len(head) < 2 * MAX_NAME:
                return False
            self._buffer = self._buffer[len(head) :]
            return self._give_up(self.MARKER + head, pieces)
        name = self._buffer[: found.start()].strip()
        if not name or re.search(r"\s", name):
            raw, self._buffer = self._buffer[: found.start()], self._buffer[found.start() :]
            return self._give_up(self.MARKER + raw, pieces)
        self._buffer = self._buffer[start.start() if start[0] == "{" else start.end() :]
        pieces.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1
        self._value, self._state = Value(), "arguments"
        return True

    def _finish_call(self, held: str) -> list[Piece]:
        if self._state == "arguments":
            return []
        if self._state == "list" and self._list.has_begun:
            return [Text(self._list.untold)] if self._list.untold else []
        return [Text(self.MARKER + (self._list.untold if self._state == "list" else "") + held)]

    @staticmethod
    def new_id() -> str:
        return random_name()[:9]

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        tags = [json_call(tool, '{"name": ', ', "arguments": ', "}") for tool in tools]
        calls = several(tags, ", ", is_single)
        parts = [{"type": "const_string", "value": cls.MARKER + " ["}, calls, {"type": "const_string", "value": "]"}]
        return {"type": "sequence", "elements": parts}


class MistralNamedParser(MistralParser):
    """The same, with calls demanded in the newer way."""

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        tags = [
            {"type": "tag", "begin": f"{cls.MARKER}{tool.name}[ARGS]", "content": schema_of(tool), "end": ""}
            for tool in tools
        ]
        return several(tags, "", is_single)


class CallList:
    """Calls as a JSON list of objects, or a single one."""

    def __init__(self, first: int, names: Collection[str] | None) -> None:
        """first: its number. names: as of `CallObject`."""
        self.num_calls = first
        self.is_done = self.is_none = False
        self.has_begun = False
        """A call has been told of."""
        self._names = names
        self._read = Kept()
        self._object: CallObject | None = None
        self._is_list: bool | None = None

    @property
    def untold(self) -> str:
        """What was read and is in no call: everything, or the last object of a list, where those before it are calls."""
        if not self.has_begun:
            return self._read.text
        return "" if self._object is None or self._object.has_begun else self._object.raw

    def push(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        at = 0
        while at < len(text) and not self.is_done and not self.is_none:
            # Within a call its own parser takes what is its part; the rest is between calls.
            if self._object is not None:
                found, rest = self._object.push(text[at:])
                self._keep(text[at : len(text) - len(rest)])
                at = len(text) - len(rest)
                pieces += found
                if any(isinstance(piece, ToolCallStart) for piece in found):
                    self.num_calls += 1
                    self.has_begun = True
                if self._object.is_none:
                    self.is_none = True
                elif self._object.is_done:
                    self._object = None
                    self.is_done = not self._is_list
                continue
            # The first character decides between a list of calls and a single one. Anything else, and the answer is
            # text.
            char = text[at]
            if char == "{" and (self._is_list or self._is_list is None):
                self._is_list = bool(self._is_list)
                self._object = CallObject(self.num_calls, self._names)
                continue
            if char == "[" and self._is_list is None:
                self._is_list = True
            elif char == "]" and self._is_list and self.has_begun:
                self.is_done = True
            elif not char.isspace() and not (char == "," and self._is_list):
                self.is_none = True
                break
            self._keep(char)
            at += 1
            self.is_none |= self._read.size > 2 * MAX_HELD
        return pieces, text[at:]

    def _keep(self, text: str) -> None:
        """What was read, until a call is told of."""
        if not self.has_begun:
            self._read.add(text)


class LlamaJsonParser(ToolParser):
    """Llama 3 and 4: JSON objects with name and parameters at the beginning of the answer, or behind <|python_tag|>."""

    MARKER = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._state = "start"
        self._object: CallObject | None = None
        self._gap = ""

    def _advance(self, pieces: list[Piece]) -> bool:
        if self._object is not None:
            found, self._buffer = self._object.push(self._buffer)
            pieces += found
            self.num_calls += any(isinstance(piece, ToolCallStart) for piece in found)
            # It was no call, and nothing of one was given out: all of it is text again.
            if self._object.is_none and not self._object.has_begun:
                pieces.append(Text(self._gap + self._object.raw))
                self._object, self._state, self._gap = None, "text", ""
            elif self._object.is_done or self._object.is_none:
                self._object, self._state, self._gap = None, "between", ""
            return self._object is None
        if self._state == "text":
            return self._text(pieces)
        bare = self._buffer.lstrip("; \t\r\n" if self._state == "between" else " \t\r\n")
        # White space, or the beginning of a marker: the next piece of text decides.
        if not bare or (self.MARKER.startswith(bare) and bare != self.MARKER):
            return False
        gap = self._buffer[: len(self._buffer) - len(bare)]
        if bare.startswith(self.MARKER):
            self._buffer = bare[len(self.MARKER) :]
            if len(self._gap) > MAX_HELD:
                pieces.append(Text(self._gap))
                self._gap = ""
            self._gap += gap + self.MARKER
            self._state = "start"
            return True
        self._buffer = bare
        if bare[0] == "{":
            self._gap += gap
            # Behind the marker every name is a call. Without it only a name of a tool is.
            self._object = CallObject(self.num_calls, None if self.MARKER in self._gap else self._names)
        else:
            if self._gap or (gap and not self.num_calls):
                pieces.append(Text(self._gap + gap))
            self._gap, self._state = "", "text"
        return True

    def _text(self, pieces: list[Piece]) -> bool:
        before, marker, after = self._buffer.partition(self.MARKER)
        if not marker:
            held = overlap(before, self.MARKER)
            before, after = before[: len(before) - held], before[len(before) - held :]
        if before:
            pieces.append(Text(before))
        self._buffer = after
        if marker:
            self._gap, self._state = marker, "start"
        return bool(marker)

    def _give_out(self, pieces: list[Piece]) -> None:
        pieces.append(Text(self._gap + self._buffer))
        self._gap, self._buffer, self._state = "", "", "text"

    def finish(self) -> list[Piece]:
        held, self._buffer = self._buffer, ""
        if self._object is not None:
            return [] if self._object.has_begun else [Text(self._gap + self._object.raw + held)]
        if self._state == "between":
            return [Text(held)] if held.strip("; \t\r\n") else []
        return [Text(self._gap + held)] if self._gap + held else []

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        return several([json_call(tool, '{"name": ', ', "parameters": ', "}") for tool in tools], "; ", is_single)


class PythonicParser(ToolParser):
    """Llama 3.2 and 4: a list of Python calls at the beginning of the answer. They are told of when the list is complete.

    A call that is demanded is written as a JSON list, as in vLLM, and read as such.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._state = "start"
        self._list = CallList(0, names)
        self._value = PythonValue()
        self._num_read = 0  # characters of the buffer that the value has seen

    def _advance(self, pieces: list[Piece]) -> bool:
        match self._state:
            case "start":
                bare = self._buffer.lstrip()
                if not bare or (bare[0] == "[" and not bare[1:].lstrip()):
                    return False
                self._state = "text" if bare[0] != "[" else "json" if bare[1:].lstrip()[0] == "{" else "name"
                return True
            case "name":
                return self._name()
            case "python":
                return self._python(pieces)
            case "json":
                found, self._buffer = self._list.push(self._buffer)
                pieces += found
                self.num_calls = self._list.num_calls
                if self._list.is_none and self._list.untold:
                    pieces.append(Text(self._list.untold))
                if self._list.is_none or self._list.is_done:
                    self._state = "text"
                return self._state == "text"
        if self._buffer.strip() or not self.num_calls:
            pieces.append(Text(self._buffer))
            self._buffer = ""
        return False

    def _give_out(self, pieces: list[Piece]) -> None:
        super()._give_out(pieces)
        self._state = "text"

    def _name(self) -> bool:
        """Whether what the list begins with is the name of a tool."""
        name, parenthesis, _ = self._buffer.lstrip()[1:].partition("(")
        name = name.strip()
        if not parenthesis and any(known.startswith(name) for known in self._names):
            return False
        self._state = "python" if name in self._names and parenthesis else "text"
        return True

    def _python(self, pieces: list[Piece]) -> bool:
        self._num_read, is_over = self._value.end(self._buffer, self._num_read)
        if is_over:
            pieces += self._told(self._buffer[: self._num_read])
            self._state = "text"
        return is_over

    def _told(self, text: str) -> list[Piece]:
        """The calls that this text at the beginning of the buffer is; if it is none, it stays there."""
        calls = _python_calls(text)
        if calls is None or any(name not in self._names for name, _ in calls):
            return []
        self._buffer = self._buffer[len(text) :]
        self.num_calls = len(calls)
        return [piece for i, (name, part) in enumerate(calls) for piece in (ToolCallStart(i, name), Arguments(i, part))]

    def finish(self) -> list[Piece]:
        pieces = self._told(self._buffer) if self._state == "python" else []
        held = self._list.untold if self._state == "json" else self._buffer
        self._buffer = ""
        if held.strip() or (held and not self.num_calls):
            pieces.append(Text(held))
        return pieces

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        calls = LlamaJsonParser.tag(tools, is_single=is_single) | {"separator": ", "}
        parts = [{"type": "const_string", "value": "["}, calls, {"type": "const_string", "value": "]"}]
        return {"type": "sequence", "elements": parts}


def _python_calls(text: str) -> list[tuple[str, str]] | None:
    """[f(a=1), g()] as names and JSON arguments; None for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call by keywords")
    arguments = {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(ast.literal_eval(key)): _python_value(value) for key, value in pairs if key is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value


# Tags -----------------------------------------------------------------------------------------------------------------


def schema_of(tool: Tool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": dict(tool.parameters)}


def json_call(tool: Tool, before_name: str, before_arguments: str, end: str) -> dict[str, Any]:
    begin = before_name + json.dumps(tool.name, ensure_ascii=False) + before_arguments
    return {"type": "tag", "begin": begin, "content": schema_of(tool), "end": end}


def several(tags: list[dict[str, Any]], separator: str, is_single: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


# Names ----------------------------------------------------------------------------------------------------------------

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_json": HermesParser,
    "llama3_json": LlamaJsonParser,
    "llama4_json": LlamaJsonParser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
}
SHOWN = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
    ("<｜tool▁call▁begin｜>", "deepseek_v31"),
    ("to=functions.", "openai"),
    ("<|action_start|>", "internlm"),
)
"""By what a chat template shows calls in the formats of `tool_formats`; the first that it has counts."""
ADAPTER = "actorllm.server.tool_formats.plugin_calls:adapted"
"""Of classes with vLLM's interface."""
DEFAULT_PARSER = "hermes"
"""Of models whose chat template shows no tools."""


def parser_named(name: str | None, templates: Sequence[str]) -> type[ToolParser]:
    """The parser of this name, or a class as 'module:Class'; None: that of the way in which a model's chat templates show calls.
    Raises ConfigError."""
    if name is not None and name not in PARSERS:
        return named_class("tool_call_parser", name, ToolParser, FORMATS, PARSERS, ADAPTER)  # type: ignore[type-abstract]
    if name is None and (shown := next(_family(templates), DEFAULT_PARSER)) not in PARSERS:
        return named_class("tool_call_parser", shown, ToolParser, FORMATS, PARSERS)  # type: ignore[type-abstract]
    found = PARSERS[name or next(_family(templates), DEFAULT_PARSER)]
    if found is MistralParser and any("[ARGS]" in template for template in templates):
        return MistralNamedParser
    return found


def _family(templates: Sequence[str]) -> Iterator[str]:
    for template in templates:
        if name := next((name for mark, name in SHOWN if mark in template), ""):
            yield name
        elif HermesParser.MARKER in template:
            yield "hermes"
        elif MistralParser.MARKER in template:
            yield "mistral"
        elif LlamaJsonParser.MARKER in template or '"parameters": dictionary of argument name' in template:
            yield "llama3_json"
        elif "[func_name1(" in template:
            yield "pythonic"
