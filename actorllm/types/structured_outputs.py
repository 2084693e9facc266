"""`StructuredOutputsParams`: what the output of a request must look like, as users say it and as it travels.

A constraint is one of: a JSON schema, any JSON object, a regular expression, a list of choices, a grammar, a structural tag.
It is checked here as far as that needs no grammar engine, and travels in `Submit` as a mapping of plain values
(`to_fields`). What it means is in `text.grammar`, in the scheduler's process.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from actorllm.errors import InvalidParameterError, UnknownParameterError, nearest_name, shown

MAX_CHARACTERS = 1 << 18
"""Of a schema or grammar."""
MAX_NESTING = 64
"""Of a schema, as in vLLM."""
MAX_MARKS = 50_000
"""Commas and opening brackets of a schema, at most: to read more takes the caller's loop too long."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of which exactly one is given."""

ANY_OBJECT = '{"type": "object"}'


@dataclass(slots=True)
class StructuredOutputsParams:
    """What the output must match; the fields are vLLM's. Exactly one of the first six is given.

    Arguments:
        json: a JSON schema, as a mapping or as text.
        regex: a regular expression of the whole output.
        choice: one of these strings.
        grammar: a context-free grammar, in the Lark syntax of llguidance or in GBNF.
        json_object: True for any JSON object.
        structural_tag: formats around schemas, such as those of tool calls, as JSON text: vLLM's
            `{"type": "structural_tag", "format": ...}` or the older one with structures and triggers.
        disable_any_whitespace: JSON without a space or newline between its tokens; default False.
        disable_additional_properties: objects of the schema have the properties that are named there and no other;
            default False.
        whitespace_pattern: a regular expression of what may be between the tokens of JSON; None: what people write.

    Raises:
        InvalidParameterError: none or several are given, or one cannot be read.

    Example:
        form = StructuredOutputsParams(choice=["happy", "sad"])
        params = SamplingParams(max_tokens=8, structured_outputs=form)
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    _source: str = field(default="structured_outputs", init=False, repr=False, compare=False)
    """What errors call it: the field of a caller that asked for it in other words."""
    _is_hint: bool = field(default=False, init=False, repr=False, compare=False)
    """What no grammar can hold of a schema is dropped, and not refused."""
    _is_whole: bool = field(default=False, init=False, repr=False, compare=False)
    """It says what a thought looks like, too."""
    _checked: str | None = field(default=None, init=False, repr=False, compare=False)
    """The JSON text that was read last, and is known to be good."""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            what = "nothing" if not given else " and ".join(given)
            raise InvalidParameterError(
                f"{self._source} needs exactly one of {', '.join(KINDS)}, and {what} {'is' if len(given) < 2 else 'are'} given"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(
                    f"{self._source}: {name}={shown(getattr(self, name))} must be True or False"
                )
        if self.whitespace_pattern is not None:
            self._check_text("whitespace_pattern", self.whitespace_pattern)
        self._text(given[0])

    def to_fields(self) -> dict[str, Any]:
        """As it travels: its kind, its text, the options that are not at their default, and what errors call it.

        Raises:
            InvalidParameterError: a field that was assigned since cannot be one.
        """
        (kind,) = (kind for kind in KINDS if getattr(self, kind) is not None)
        values: dict[str, Any] = {"kind": kind, "text": self._text(kind), "source": self._source}
        if kind == "json_object":
            values["kind"] = "json"
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name):
                values[name] = getattr(self, name)
        if self._is_hint:
            values["strict"] = False
        if self._is_whole:
            values["is_whole"] = True
        return values

    def named(self, source: str) -> StructuredOutputsParams:
        """The same, called by another name in errors.

        Arguments:
            source: that name.
        """
        self._source = source
        return self

    def as_hint(self) -> StructuredOutputsParams:
        """The same, but what no grammar can hold of its schema is dropped: OpenAI's "strict": false."""
        self._is_hint = True
        return self

    def from_start(self) -> StructuredOutputsParams:
        """The same, but it holds for what the model thinks, too."""
        self._is_whole = True
        return self

    def _text(self, kind: str) -> str:
        """The constraint as text. Raises InvalidParameterError for what cannot be one."""
        value = getattr(self, kind)
        match kind:
            case "json_object":
                if value is not True:
                    raise InvalidParameterError(f"{self._source}: json_object={shown(value)} must be True or left out")
                return ANY_OBJECT
            case "choice":
                return self._choice(value)
            case "json":
                return self._json(kind, value if isinstance(value, str) else self._written(kind, value))
            case "structural_tag":
                return self._json(kind, value)
        self._check_text(kind, value)
        if kind == "regex" and "\x00" in value:
            raise InvalidParameterError(f"{self._source}: a regex must not hold a NUL character")
        if kind == "grammar" and not value.strip():
            raise InvalidParameterError(f"{self._source}: grammar is empty")
        return str(value)

    def _choice(self, value: Any) -> str:
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(c, str) for c in value):
            raise InvalidParameterError(f"{self._source}: choice={shown(value)} must be a list of strings")
        if not value:
            raise InvalidParameterError(f"{self._source}: choice is empty, so there is nothing to choose")
        text = json.dumps(list(value), ensure_ascii=False)
        self._check_text("choice", text)
        return text

    def _written(self, kind: str, value: Any) -> str:
        if not isinstance(value, Mapping):
            raise InvalidParameterError(
                f"{self._source}: {kind}={shown(value)} must be a JSON schema, as a mapping or as text"
            )
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except RecursionError:
            raise InvalidParameterError(f"{self._source}: {kind} is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise InvalidParameterError(f"{self._source}: {kind} cannot be written as JSON: {error}") from error

    def _json(self, kind: str, text: Any) -> str:
        self._check_text(kind, text)
        if text == self._checked:
            return str(text)
        num_marks = text.count(",") + text.count("{") + text.count("[")
        if num_marks > MAX_MARKS:
            raise InvalidParameterError(
                f"{self._source}: {kind} has {num_marks} commas and opening brackets, and the limit is {MAX_MARKS}"
            )
        try:
            tree = json.loads(text)
            depth = _depth(tree)
        except RecursionError:
            raise InvalidParameterError(f"{self._source}: {kind} is nested too deeply") from None
        except ValueError as error:
            raise InvalidParameterError(f"{self._source}: {kind} is not valid JSON: {error}") from error
        if not isinstance(tree, dict):
            raise InvalidParameterError(f"{self._source}: {kind} must be a JSON object, not {text:.80}")
        if depth > MAX_NESTING:
            raise InvalidParameterError(
                f"{self._source}: {kind} is nested {depth} levels deep, and the limit is {MAX_NESTING}"
            )
        self._checked = text
        return str(text)

    def _check_text(self, name: str, text: Any) -> None:
        if not isinstance(text, str):
            raise InvalidParameterError(f"{self._source}: {name}={shown(text)} must be a string")
        if len(text) > MAX_CHARACTERS:
            raise InvalidParameterError(
                f"{self._source}: {name} has {len(text)} characters, and the limit is {MAX_CHARACTERS}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidParameterError(f"{self._source}: {name} holds characters that are not valid Unicode") from None


class GuidedDecodingParams(StructuredOutputsParams):
    """`StructuredOutputsParams` by the name that they have in older releases of vLLM.

    Arguments:
        values, fields: of StructuredOutputsParams; besides backend, backend_was_auto and disable_fallback, which have no
            effect, since there is one backend.

    Raises:
        InvalidParameterError: as StructuredOutputsParams.
    """

    def __init__(self, *values: Any, **fields: Any) -> None:
        positions = ("json", "regex", "choice", "grammar", "json_object", "backend")
        fields |= dict(zip(positions, values, strict=False))
        for name in ("backend", "backend_was_auto", "disable_fallback"):
            fields.pop(name, None)
        super().__init__(**fields)

    @classmethod
    def from_optional(cls, **fields: Any) -> GuidedDecodingParams | None:
        """None where no constraint is given.

        Arguments:
            fields: of the constructor.
        """
        return cls(**fields) if any(fields.get(kind) is not None for kind in KINDS) else None


OPTIONS = tuple(f.name for f in fields(StructuredOutputsParams) if f.init)


def structured_outputs_of(given: Any) -> StructuredOutputsParams | None:
    """What a program or a client gave, checked: parameters, or a mapping of their fields. Raises InvalidParameterError."""
    if given is None:
        return None
    if isinstance(given, StructuredOutputsParams):
        checked: StructuredOutputsParams = copy.copy(given)
        checked.__post_init__()  # fields may have been assigned since
        return checked
    if not isinstance(given, Mapping):
        raise InvalidParameterError(
            f"structured_outputs={shown(given)} must be StructuredOutputsParams, or a mapping of its fields"
        )
    for name in given:
        if name not in OPTIONS:
            nearest = nearest_name(name, OPTIONS) if isinstance(name, str) else ""
            raise UnknownParameterError(f"structured_outputs has no parameter {shown(name)}{nearest}")
    return StructuredOutputsParams(**given)


def _depth(tree: Any) -> int:
    """How deep lists and objects are within each other; 0 for a plain value."""
    depth, level = 0, [tree] if isinstance(tree, dict | list) else []
    while level:
        depth += 1
        if depth > MAX_NESTING:
            break
        inner: list[Any] = []
        for one in level:
            inner += one.values() if type(one) is dict else one
        level = [one for one in inner if type(one) is dict or type(one) is list]
    return depth


def with_engine_options(params: StructuredOutputsParams, options: Mapping[str, bool]) -> StructuredOutputsParams:
    """Another of these, for which the options of the engine hold besides its own. options: those that are on."""
    made = copy.copy(params)
    if params.whitespace_pattern is None:  # which says more
        made.disable_any_whitespace |= options.get("disable_any_whitespace", False)
    made.disable_additional_properties |= options.get("disable_additional_properties", False)
    return made.from_start() if options.get("enable_in_reasoning") else made
