"""Random JSON schemas of bounded values, and a check of values against them that shares nothing with the engine."""

from __future__ import annotations

import random
import re
from typing import Any


def random_schema(seed: int, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are all of bounded length."""
    rng = random.Random(seed)
    return _object(rng, depth)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _enum, _boolean, _null, _pattern]
    makers = leaves + ([_object, _array, _choice] * 2 if depth else [])
    return rng.choice(makers)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "age", "a b", "x", "Kind", "nested", "ähnlich", '"quoted"', "tags"], rng.randint(1, 4))
    properties = {name: _any(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 9)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[a-z]{2,6}$", "^[0-9]{4}-[0-9]{2}$", "^(ja|nein)!?$"])}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 1, 2.5, None, True, "a longer value"], rng.randint(1, 4))}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of such a schema."""
    if "anyOf" in schema:
        return any(matches(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema["type"]:
        case "object":
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(schema["properties"])
                and all(matches(one, schema["properties"][name]) for name, one in value.items())
            )
        case "array":
            size_fits = isinstance(value, list) and len(value) >= schema.get("minItems", 0)
            return (
                size_fits and len(value) <= schema["maxItems"] and all(matches(one, schema["items"]) for one in value)
            )
        case "string":
            if not isinstance(value, str) or not schema.get("minLength", 0) <= len(value) <= schema.get(
                "maxLength", 99
            ):
                return False
            return "pattern" not in schema or re.search(schema["pattern"], value) is not None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
    raise AssertionError(schema)
