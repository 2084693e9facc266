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
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

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
MAX_TOLD = 10

UNHELD_PATTERN = re.compile(r"\(\?[=!]|\(\?<[=!]|\(\?P=|\\[1-9]|\\k<")
"""Look-around and back references."""


class UnheldError(ValueError):
    """A schema asks for what no grammar can hold; the message names the keyword."""


def held(schema: Any, *, is_hint: bool) -> list[str]:
    """Make a schema one that can be held, in place. Returns what was dropped, one keyword and its place each.

    is_hint: what cannot be held is dropped; else it raises UnheldError. The schema is a tree of fresh JSON values.
    """
    dropped: list[str] = []
    for part, place in parts_of(schema):
        _check_references(part, schema, place)
        if part.pop("uniqueItems", None) is True:
            dropped.append(_named("uniqueItems", place))
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
    return dropped[:MAX_TOLD]


def parts_of(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every schema in a schema, itself first, with its place. What a part loses before the next is taken is not visited."""
    waiting: list[tuple[Any, str]] = [(schema, "")]
    while waiting:
        part, place = waiting.pop()
        if isinstance(part, list):
            waiting.extend((one, f"{place}/{at}") for at, one in enumerate(part))
        if not isinstance(part, dict):
            continue
        yield part, place
        for name in PART_MAPS:
            inner = part.get(name)
            if isinstance(inner, dict):
                waiting.extend((one, f"{place}/{name}/{key}") for key, one in inner.items())
        for name in ALL_PARTS:
            inner = part.get(name)
            if isinstance(inner, dict | list):
                waiting.append((inner, f"{place}/{name}"))


def close_objects(schema: Any) -> None:
    """Objects have the properties that are named and no other, where the schema says nothing of it. In place."""
    for part, _ in parts_of(schema):
        if "additionalProperties" not in part and any(
            isinstance(part.get(name), dict) for name in ("properties", "patternProperties")
        ):
            part["additionalProperties"] = False


def _drop(part: dict[str, Any], name: str, place: str, dropped: list[str], *, is_hint: bool) -> None:
    if not is_hint:
        raise UnheldError(
            f"{_named(name, place)} cannot be held by a grammar; leave it out, or say strict=false in response_format or tools"
        )
    del part[name]
    dropped.append(_named(name, place))


def _named(name: str, place: str) -> str:
    return f"{name} (at #{place})" if place else name


def _check_references(part: dict[str, Any], schema: Any, place: str) -> None:
    """A schema that refers to itself before it says anything stands for no value at all."""
    seen: set[int] = set()
    at: Any = part
    while isinstance(at, dict) and isinstance(reference := at.get("$ref"), str):
        if id(at) in seen:
            raise UnheldError(f"$ref={reference!r:.80} (at #{place}) refers to itself and to nothing else")
        seen.add(id(at))
        at = _target(schema, reference)


def _target(schema: Any, reference: str) -> Any:
    """What a reference within the schema points to; None: it is none, or points nowhere, which llguidance tells."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    at = schema
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and step.isdigit():
            at = at[int(step)] if int(step) < len(at) else None
        else:
            at = at.get(step) if isinstance(at, dict) else None
    return at


def _rewrite_multiples(part: dict[str, Any], place: str, dropped: list[str], *, is_hint: bool) -> None:
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


def _drop_multiple(part: dict[str, Any], place: str, dropped: list[str], *, is_hint: bool) -> None:
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def _digits(value: Fraction) -> int:
    """A decimal number without its point."""
    while value.denominator != 1:
        value *= 10
    return value.numerator


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)
