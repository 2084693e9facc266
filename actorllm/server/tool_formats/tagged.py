"""Calls as tags, with an element for each argument: Qwen 3 Coder, Seed OSS, MiniMax M2, GLM 4.5, DeepSeek V3.2.

Values are written without quotes. The schema of the function says what they are: `value_of`. Strings are streamed; other values
are told of when they are complete. A call that is demanded has its arguments as one JSON object between the tags: a grammar
holds its schema as a whole.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from actorllm.server.tool_parsers import (
    MAX_NAME,
    Arguments,
    MarkedParser,
    Piece,
    Text,
    Tool,
    ToolCallStart,
    Value,
    schema_of,
    several,
)
from actorllm.text.markers import overlap

KINDS: dict[str, tuple[type[Any], ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "string": (str,),
}
MAX_BRANCHES = 32
"""Of a schema that are looked at for what a value may be."""


def kinds_of(schema: Any) -> set[str]:
    """Which of KINDS a value of this schema may be; empty: the schema does not say."""
    found: set[str] = set()
    left = [schema]
    for _ in range(MAX_BRANCHES):
        if not left:
            break
        one = left.pop()
        if not isinstance(one, Mapping):
            continue
        named = one.get("type")
        found |= {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
        values = [
            *(one["enum"] if isinstance(one.get("enum"), list) else ()),
            *([one["const"]] if "const" in one else ()),
        ]
        if named is None:
            found |= {kind for kind in KINDS for value in values if _is_of(value, {kind})}
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(one.get(key), list):
                left += one[key]
    return found & KINDS.keys()


def value_of(text: str, kinds: Collection[str]) -> str:
    """A value as JSON: what it says, where that is of these kinds; else a string."""
    bare = text.strip()
    try:
        value = json.loads(bare, parse_constant=_no_constant)
        if _is_of(value, kinds):
            return bare
    except (ValueError, RecursionError):
        pass
    try:  # as Python writes it
        value = ast.literal_eval(bare)
        if _is_of(value, kinds):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _is_of(value: Any, kinds: Collection[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, one) for kind in kinds if kind != "boolean" for one in KINDS[kind])


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


class TaggedParser(MarkedParser):
    """MARKER; for each call CALL, its name, NAME_END, its arguments, CALL_END; END."""

    CALL: ClassVar[str]
    """Empty: MARKER begins the call, too, and END ends it."""
    NAME_END: ClassVar[str]
    KEY: ClassVar[str]
    KEY_END: ClassVar[str]
    VALUE: ClassVar[str] = ""
    """Behind KEY_END and space; empty: the value follows at once."""
    VALUE_END: ClassVar[str]
    CALL_END: ClassVar[str]
    END: ClassVar[str]
    NEWLINES: ClassVar[bool] = True
    """A value stands on lines of its own."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._kinds: set[str] = set()
        self._has_arguments = False
        self._is_string = False
        self._has_begun_value = False
        self._value = Value()
        self._properties: Mapping[str, Any] = {}
        self._num_searched = 0
        """Characters of the buffer in which a value has no end."""

    def _in_call(self, pieces: list[Piece]) -> bool:
        match self._state:
            case "marked":
                if self.CALL:
                    return self._between(self.CALL, self.END, "name", pieces)
                self._state = "name"
                return True
            case "name":
                return self._name(pieces)
            case "body":
                return self._body(pieces)
            case "key":
                return self._key(pieces)
            case "before value":
                return self._before_value()
            case "json":
                return self._json(pieces)
        return self._read_value(pieces)

    def _name(self, pieces: list[Piece]) -> bool:
        window = self._buffer[: 2 * MAX_NAME]
        end, num_taken = self._name_end(window)
        if end < 0 and len(window) < 2 * MAX_NAME:
            return False
        name = window[: max(end, 0)].strip()
        raw, self._buffer = self._buffer[:num_taken], self._buffer[num_taken:]
        if not name or "\n" in name:
            return self._give_up(("" if self.num_calls else self._marker) + self.CALL + raw, pieces)
        schema = self._names.get(name) if isinstance(self._names, Mapping) else None
        found = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = found if isinstance(found, Mapping) else {}
        pieces.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1
        self._state, self._has_arguments = "body", False
        return True

    def _name_end(self, text: str) -> tuple[int, int]:
        """Where the name ends, below 0: nowhere yet; and how much is read with it."""
        place = text.find(self.NAME_END)
        return place, len(text) if place < 0 else place + len(self.NAME_END)

    def _body(self, pieces: list[Piece]) -> bool:
        """Between arguments: the next one, or the end. What is neither is left out."""
        bare = self._buffer = self._buffer.lstrip()
        if bare.startswith("{") and not self._has_arguments:
            self._state, self._value, self._has_arguments = "json", Value(), True
        elif bare.startswith(self.KEY):
            self._buffer, self._state = bare[len(self.KEY) :], "key"
        elif bare.startswith((self.CALL_END, self.END)):
            pieces.append(Arguments(self.num_calls - 1, "}" if self._has_arguments else "{}"))
            self._end_call(bare)
        elif any(marker.startswith(bare) for marker in (self.KEY, self.CALL_END, self.END)):
            return False
        else:
            places = [place for mark in "<{" if (place := bare.find(mark, 1)) > 0]
            self._buffer = bare[min(places) :] if places else ""
        return bool(self._buffer) or self._state == "text"

    def _end_call(self, bare: str) -> None:
        is_all = bare.startswith(self.END)
        self._buffer = bare[len(self.END if is_all else self.CALL_END) :]
        self._state = "text" if is_all else "marked"

    def _json(self, pieces: list[Piece]) -> bool:
        """All arguments as one object."""
        end, is_over = self._value.end(self._buffer, 0)
        if end:
            pieces.append(Arguments(self.num_calls - 1, self._buffer[:end]))
        self._buffer = self._buffer[end:]
        if is_over:
            self._state = "after json"
        return is_over

    def _key(self, pieces: list[Piece]) -> bool:
        window = self._buffer[: 2 * MAX_NAME]
        key, end, _ = window.partition(self.KEY_END)
        if not end and len(window) < 2 * MAX_NAME:
            return False
        self._buffer = self._buffer[len(key) + len(end) :] if end else self._buffer[len(window) :]
        if not end:
            self._state = "body"
            return True
        key = self._read_key(key)
        told = ("{" if not self._has_arguments else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        pieces.append(Arguments(self.num_calls - 1, told))
        self._has_arguments = True
        self._is_string = not self._kinds or self._kinds == {"string"}
        self._has_begun_value = False
        self._num_searched = 0
        self._state = "before value" if self.VALUE else "value"
        return True

    def _read_key(self, head: str) -> str:
        """The key, and `_kinds` of its value."""
        key = head.strip()
        self._kinds = kinds_of(self._properties.get(key))
        return key

    def _before_value(self) -> bool:
        bare = self._buffer.lstrip()
        if len(bare) < len(self.VALUE) and self.VALUE.startswith(bare):
            return False
        self._buffer = bare.removeprefix(self.VALUE)
        self._state = "value"
        return True

    def _read_value(self, pieces: list[Piece]) -> bool:
        if self._state == "after json":
            return self._after_json()
        place = self._buffer.find(self.VALUE_END, max(0, self._num_searched - len(self.VALUE_END)))
        end = place >= 0
        part, after = (self._buffer[:place], self._buffer[place + len(self.VALUE_END) :]) if end else (self._buffer, "")
        if not self._is_string:
            self._num_searched = len(self._buffer)
            if not end:
                return False
            pieces.append(Arguments(self.num_calls - 1, value_of(self._trimmed(part), self._kinds)))
        else:
            if not end:
                part = part[: len(part) - self._num_closing(part)]
            self._stream(part, end, pieces)
            if not end:
                self._buffer = self._buffer[len(part) :]
                return False
        self._buffer, self._state = after, "body"
        return True

    def _stream(self, part: str, is_last: bool, pieces: list[Piece]) -> None:
        """Part of a string, with the quotes where it begins and ends."""
        told = ""
        if not self._has_begun_value and (part or is_last):
            self._has_begun_value = True
            told = '"'
            part = part.removeprefix("\n") if self.NEWLINES else part
        if is_last and self.NEWLINES:
            part = part.removesuffix("\n")
        told += json.dumps(part, ensure_ascii=False)[1:-1] + ('"' if is_last else "")
        if told:
            pieces.append(Arguments(self.num_calls - 1, told))

    def _num_closing(self, text: str) -> int:
        """Characters at its end that may begin the end of the value."""
        held = overlap(text, self.VALUE_END)
        return max(held, overlap(text, "\n" + self.VALUE_END)) if self.NEWLINES else held

    def _trimmed(self, part: str) -> str:
        return part.removeprefix("\n").removesuffix("\n") if self.NEWLINES else part

    def _after_json(self) -> bool:
        """Up to the end of the call there is nothing more."""
        places = [place for mark in (self.CALL_END, self.END) if (place := self._buffer.find(mark)) >= 0]
        if not places:
            held = max(overlap(self._buffer, mark) for mark in (self.CALL_END, self.END))
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        self._end_call(self._buffer[min(places) :])
        return True

    def _give_out(self, pieces: list[Piece]) -> None:
        """A value that is too long to be held back goes on as a string."""
        if self._state != "value":
            return super()._give_out(pieces)
        if self._is_string:  # what may be its end is short
            return None
        self._is_string = True
        self._num_searched = 0
        self._read_value(pieces)
        return None

    def _finish_call(self, held: str) -> list[Piece]:
        """Of a call that was told of, what there is of its arguments."""
        pieces: list[Piece] = []
        if self._state in ("marked", "name") and (held.strip() or not self.num_calls):
            call = self.CALL if self._state == "name" else ""
            pieces.append(Text(("" if self.num_calls else self._marker) + call + held))
        elif self._state == "value" and self._is_string:
            self._stream(held[: len(held) - self._num_closing(held)], False, pieces)
        return pieces

    @classmethod
    def tag(cls, tools: Sequence[Tool], *, is_single: bool) -> dict[str, Any]:
        tags = [
            {
                "type": "tag",
                "begin": cls.MARKER + (f"\n{cls.CALL}" if cls.CALL else "") + tool.name + cls.NAME_END + "\n",
                "content": schema_of(tool),
                "end": "\n" + cls.CALL_END + (f"\n{cls.END}" if cls.CALL else ""),
            }
            for tool in tools
        ]
        return several(tags, "\n", is_single)


class Qwen3CoderParser(TaggedParser):
    """Qwen 3 Coder: <function=name> and <parameter=key>; the marker before them may be missing."""

    MARKER = "<tool_call>"
    CALL = "<function="
    NAME_END = ">"
    KEY = "<parameter="
    KEY_END = ">"
    VALUE_END = "</parameter>"
    CALL_END = "</function>"
    END = "</tool_call>"

    def _first_marker(self) -> tuple[str, str, str]:
        found = self._buffer.partition(self.MARKER)
        bare = self._buffer.partition(self.CALL)
        if bare[1] and len(bare[0]) < len(found[0]):
            self._marker = ""
            return bare[0], bare[1], bare[1] + bare[2]  # as if the marker stood before it
        self._marker = self.MARKER
        return found

    def _num_held(self) -> int:
        return max(overlap(self._buffer, self.MARKER), overlap(self._buffer, self.CALL))


class SeedOSSParser(Qwen3CoderParser):
    """Seed OSS: the same between markers of its own."""

    MARKER = "<seed:tool_call>"
    END = "</seed:tool_call>"


class MiniMaxM2Parser(TaggedParser):
    """MiniMax M2: <invoke name="..."> and <parameter name="...">."""

    MARKER = "<minimax:tool_call>"
    CALL = '<invoke name="'
    NAME_END = '">'
    KEY = '<parameter name="'
    KEY_END = '">'
    VALUE_END = "</parameter>"
    CALL_END = "</invoke>"
    END = "</minimax:tool_call>"


class DeepSeekV32Parser(MiniMaxM2Parser):
    """DeepSeek V3.2: tags of its own, which say whether a value is a string."""

    MARKER = "<｜DSML｜function_calls>"
    CALL = '<｜DSML｜invoke name="'
    KEY = '<｜DSML｜parameter name="'
    VALUE_END = "</｜DSML｜parameter>"
    CALL_END = "</｜DSML｜invoke>"
    END = "</｜DSML｜function_calls>"
    NEWLINES = False

    def _read_key(self, head: str) -> str:
        key, _, attribute = head.partition('" string="')
        self._kinds = {"string"} if attribute == "true" else KINDS.keys() - {"string"}
        return key


class GLM45Parser(TaggedParser):
    """GLM 4.5: the name, then <arg_key> and <arg_value> for each argument."""

    MARKER = "<tool_call>"
    CALL = ""
    NAME_END = "\n"
    KEY = "<arg_key>"
    KEY_END = "</arg_key>"
    VALUE = "<arg_value>"
    VALUE_END = "</arg_value>"
    CALL_END = END = "</tool_call>"
    NEWLINES = False

    def _name_end(self, text: str) -> tuple[int, int]:
        """Up to the end of the line, or the first tag."""
        num_space = len(text) - len(text.lstrip())
        places = [place for mark in ("\n", "<", "{") if (place := text.find(mark, num_space)) >= 0]
        return (min(places), min(places)) if places else (-1, len(text))
