"""JSON schemas as llguidance can hold them: an equivalent schema, and a refusal by name of what it cannot hold.

A `format` that llguidance does not know is an annotation and goes. `multipleOf` and the bounds beside it become the multiples
that they stand for. llguidance does not see that a range holds no multiple of a fraction, and finds out in the middle of an
answer. `uniqueItems` is no property of a context-free grammar: it is left to the model, and said so. Every other
keyword that cannot be held is refused, or dropped and said so where the schema is only a hint. Pure; called by text.grammar and
by the server, which tells clients of what is dropped.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

PART_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
PARTS = ("items", "prefixItems", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains", "propertyNames")
ALL_PARTS = (*PARTS, "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties")

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Those that llguidance holds."""
UUIDS = frozenset(f"uuid{version}" for version in range(1, 9))

NOT_HELD = frozenset(
    (
        *("contains", "minContains", "maxContains", "propertyNames", "dependentRequired", "dependentSchemas"),
        *("dependencies", "if", "then", "else", "not", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that llguidance has no grammar for."""
NAMES_ONLY = ("$dynamicAnchor", "$recursiveAnchor")
"""They mean nothing where nothing refers to them."""

MAX_MULTIPLE = 10_000
"""Digits of `multipleOf` as an integer: a number is read digit by digit, by an automaton of so many states."""
MAX_FLOAT = sys.float_info.max
MAX_TOLD = 10
MAX_STEP = 40
"""Characters of each name in a place that a message tells."""
MAX_PLACE_DIGITS = 6
"""Of a place in a list that a reference names: no list of a schema is longer."""

Place: TypeAlias = "tuple[Place, str | int] | None"
"""Of a schema within the whole: the place around it, and the step from there; None: the whole. A text is made of it where it is
told only: there may be as many places as characters, and each may be as long as the schema."""

UNHELD_PATTERN = re.compile(r"\(\?[=!]|\(\?<[=!]|\(\?P=|\\[1-9]|\\k<")
"""Look-around and back references."""


class UnheldError(ValueError):
    """A schema asks for what no grammar can hold; the message names the keyword."""


def held(schema: Any, *, is_hint: bool) -> list[str]:
    """Make a schema one that can be held, in place. Returns what was dropped, one keyword and its place each, of the first
    MAX_TOLD.

    is_hint: what cannot be held is dropped; else it raises UnheldError. The schema is a tree of fresh JSON values.
    """
    dropped: list[str] = []
    good: dict[int, Any] = {}
    for part, place in parts_of(schema):
        _check_references(part, schema, place, good)
        if part.pop("uniqueItems", None) is True:
            _tell("uniqueItems", place, dropped)
        for name in NAMES_ONLY:
            part.pop(name, None)
        # Keywords without an equivalent, in any schema.
        for name in [name for name in part if name in NOT_HELD]:
            _drop(part, name, place, dropped, is_hint=is_hint)
        pattern = part.get("pattern")
        # Of these llguidance holds some. It refuses the others itself, which only a demand may lead to.
        if is_hint and isinstance(pattern, str) and UNHELD_PATTERN.search(pattern):
            _drop(part, "pattern", place, dropped, is_hint=True)
        if is_hint and ("minProperties" in part or "maxProperties" in part) and part.get("properties"):
            for name in ("minProperties", "maxProperties"):
                if name in part:
                    _drop(part, name, place, dropped, is_hint=True)
        format = part.get("format")
        # An unknown format is an annotation, by the standard.
        if isinstance(format, str) and format not in FORMATS:
            if format in UUIDS:
                part["format"] = "uuid"
            else:
                del part["format"]
        if "multipleOf" in part:
            _rewrite_multiples(part, place, dropped, is_hint=is_hint)
    return dropped


def parts_of(schema: Any) -> Iterator[tuple[dict[str, Any], Place]]:
    """Every schema in a schema, itself first, with its place. What a part loses before the next is taken is not visited."""
    waiting: list[tuple[Any, Place]] = [(schema, None)]
    while waiting:
        part, place = waiting.pop()
        if isinstance(part, list):
            waiting.extend((one, (place, at)) for at, one in enumerate(part))
        if not isinstance(part, dict):
            continue
        yield part, place
        for name in PART_MAPS:
            inner = part.get(name)
            if isinstance(inner, dict):
                here: Place = (place, name)
                waiting.extend((one, (here, key)) for key, one in inner.items())
        for name in ALL_PARTS:
            inner = part.get(name)
            if isinstance(inner, dict | list):
                waiting.append((inner, (place, name)))


def close_objects(schema: Any) -> None:
    """Objects have the properties that are named and no other, where the schema says nothing of it. In place."""
    for part, _ in parts_of(schema):
        if "additionalProperties" not in part and any(
            isinstance(part.get(name), dict) for name in ("properties", "patternProperties")
        ):
            part["additionalProperties"] = False


def _drop(part: dict[str, Any], name: str, place: Place, dropped: list[str], *, is_hint: bool) -> None:
    if not is_hint:
        raise UnheldError(
            f"{_named(name, place)} cannot be held by a grammar; leave it out, or say strict=false in response_format or tools"
        )
    del part[name]
    _tell(name, place, dropped)


def _tell(name: str, place: Place, dropped: list[str]) -> None:
    if len(dropped) < MAX_TOLD:
        dropped.append(_named(name, place))


def _named(name: str, place: Place) -> str:
    return name if place is None else f"{name} (at {_written(place)})"


def _written(place: Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        text = str(step)
        steps.append(text if len(text) <= MAX_STEP else f"{text[:MAX_STEP]}...")
    return "#" + "".join(f"/{step}" for step in reversed(steps))


def _check_references(part: dict[str, Any], schema: Any, place: Place, good: dict[int, Any]) -> None:
    """A schema that refers to itself before it says anything stands for no value at all.

    good: schemas that are known to refer to another one, by id, so that a chain of references is followed once.
    """
    seen: dict[int, Any] = {}
    at: Any = part
    while isinstance(at, dict) and isinstance(reference := at.get("$ref"), str) and id(at) not in good:
        if id(at) in seen:
            told = _named(f"$ref={reference[:MAX_STEP]!r}", place)
            raise UnheldError(f"{told} refers to itself and to nothing else")
        seen[id(at)] = at
        at = _target(schema, reference)
    good |= seen


def _target(schema: Any, reference: str) -> Any:
    """What a reference within the schema points to; None: it is none, or points nowhere, which llguidance tells."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    at = schema
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and step.isascii() and step.isdecimal() and len(step) <= MAX_PLACE_DIGITS:
            at = at[int(step)] if int(step) < len(at) else None
        else:
            at = at.get(step) if isinstance(at, dict) else None
        if at is None:
            break
    return at


def _rewrite_multiples(part: dict[str, Any], place: Place, dropped: list[str], *, is_hint: bool) -> None:
    """Say the same with the multiples themselves: bounds become the outermost multiples within them."""
    step = _fraction(part["multipleOf"])
    if step is None or step <= 0:
        return  # llguidance refuses it, in its words
    types = part.get("type")
    types = [types] if isinstance(types, str) else types if isinstance(types, list) else ()
    if "integer" in types and "number" not in types:
        step = Fraction(step.numerator)  # the integers among the multiples of n/d are the multiples of n
    if _digits(step) > MAX_MULTIPLE:
        _drop_multiple(part, place, dropped, is_hint=is_hint)
        return
    part["multipleOf"] = _number(step)
    low = _bound(part, "minimum", "exclusiveMinimum", step, up=True)
    high = _bound(part, "maximum", "exclusiveMaximum", step, up=False)
    if low is not None:
        part["minimum"] = _number(low)
        part.pop("exclusiveMinimum", None)
    if high is not None:
        part["maximum"] = _number(high)
        part.pop("exclusiveMaximum", None)


def _drop_multiple(part: dict[str, Any], place: Place, dropped: list[str], *, is_hint: bool) -> None:
    if not is_hint:
        raise UnheldError(
            f"{_named('multipleOf', place)}={part['multipleOf']!r:.40} cannot be held by a grammar: without its decimal point it "
            f"must be at most {MAX_MULTIPLE}"
        )
    _drop(part, "multipleOf", place, dropped, is_hint=True)


def _bound(part: dict[str, Any], name: str, exclusive: str, step: Fraction, *, up: bool) -> Fraction | None:
    """The outermost multiple within a lower (up) or an upper bound; None: there is no bound, or one that is no number."""
    found: list[int] = []
    for key in (name, exclusive):
        value = _fraction(part.get(key))
        if value is None:
            continue
        count = math.ceil(value / step) if up else math.floor(value / step)
        if key == exclusive and count * step == value:
            count += 1 if up else -1
        found.append(count)
    if not found:
        return None
    return (max(found) if up else min(found)) * step


def _fraction(value: Any) -> Fraction | None:
    """The number as it is written in decimal."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_FLOAT <= value <= MAX_FLOAT:
        return None  # llguidance refuses a number that no float holds, in its words
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def _digits(value: Fraction) -> int:
    """A decimal number without its point."""
    twos = (value.denominator & -value.denominator).bit_length() - 1
    fives = round(math.log(value.denominator >> twos, 5))
    digits: int = value.numerator * 10 ** max(twos, fives) // value.denominator
    return digits


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)
