"""Schemas are rewritten into ones that mean the same, and what cannot be held is named."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from actorllm.text.json_schema import UnheldError, close_objects, held


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "integer", "multipleOf": 3.7}, {"type": "integer", "multipleOf": 37}),
        ({"type": "integer", "multipleOf": 2.5, "minimum": 1}, {"type": "integer", "multipleOf": 5, "minimum": 5}),
        ({"type": ["integer", "number"], "multipleOf": 2.5}, {"type": ["integer", "number"], "multipleOf": 2.5}),
        (
            {"type": "number", "multipleOf": 0.05, "exclusiveMinimum": 95, "maximum": 95.52},
            {"type": "number", "multipleOf": 0.05, "minimum": 95.05, "maximum": 95.5},
        ),
        (
            {"type": "integer", "multipleOf": 7, "minimum": 10, "exclusiveMaximum": 70},
            {"type": "integer", "multipleOf": 7, "minimum": 14, "maximum": 63},
        ),
        (
            {"type": "number", "multipleOf": 2, "minimum": -3, "exclusiveMinimum": -2},
            {"type": "number", "multipleOf": 2, "minimum": 0},
        ),
        ({"type": "string", "format": "path"}, {"type": "string"}),
        ({"type": "string", "format": "uuid4"}, {"type": "string", "format": "uuid"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"uniqueItems": False}, {}),
        ({"$dynamicAnchor": "a"}, {}),
        ({"enum": [{"uniqueItems": True, "format": "x"}]}, {"enum": [{"uniqueItems": True, "format": "x"}]}),
        (
            {"properties": {"not": {"type": "string"}, "$ref": {"type": "null"}}},
            {"properties": {"not": {"type": "string"}, "$ref": {"type": "null"}}},
        ),
    ],
    ids=str,
)
def test_it_means_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for wrapped, outer in (
        (given, expected),
        ({"anyOf": [{"items": copy.deepcopy(given)}]}, {"anyOf": [{"items": expected}]}),
        ({"additionalProperties": copy.deepcopy(given)}, {"additionalProperties": expected}),
    ):
        assert held(wrapped, is_hint=False) == []
        assert json.dumps(wrapped, sort_keys=True) == json.dumps(outer, sort_keys=True)


def test_what_is_dropped_is_told_with_its_place() -> None:
    schema = {"properties": {"tags": {"type": "array", "uniqueItems": True, "contains": {}}}, "minProperties": 1}
    assert sorted(held(copy.deepcopy(schema), is_hint=True)) == [
        "contains (at #/properties/tags)",
        "minProperties",
        "uniqueItems (at #/properties/tags)",
    ]
    with pytest.raises(UnheldError, match=r"contains \(at #/properties/tags\) cannot be held"):
        held(schema, is_hint=False)


def test_a_multiple_of_too_many_states() -> None:
    with pytest.raises(UnheldError, match=r"multipleOf=0.00003 .* at most 10000|multipleOf=3e-05|multipleOf=1000003"):
        held({"type": "integer", "multipleOf": 1000003}, is_hint=False)
    schema = {"type": "number", "multipleOf": 1.00003}
    assert held(schema, is_hint=True) == ["multipleOf"]
    assert schema == {"type": "number"}
    assert held({"multipleOf": 1e-300}, is_hint=True) == []
    assert held({"multipleOf": "7"}, is_hint=False) == []


@pytest.mark.parametrize("reference", ["#", "#/$defs/a", "#/allOf/0"])
def test_a_reference_that_says_nothing(reference: str) -> None:
    schema = {"$ref": reference, "$defs": {"a": {"$ref": "#"}}, "allOf": [{"$ref": "#"}]}
    with pytest.raises(UnheldError, match="refers to itself"):
        held(schema, is_hint=True)


@pytest.mark.parametrize(
    "reference", ["#/properties/none", "#/properties/a/~1b~0c", "#anchor", "http://x", "#/allOf/7"]
)
def test_other_references_are_left_alone(reference: str) -> None:
    schema = {"properties": {"a": {"/b~c": {"type": "null"}}, "b": {"$ref": reference}}, "allOf": [{}]}
    assert held(schema, is_hint=False) == []


def test_objects_are_closed() -> None:
    schema = {"properties": {"a": {"items": {"properties": {}}}, "b": {"additionalProperties": True, "properties": {}}}}
    close_objects(schema)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"]["items"]["additionalProperties"] is False
    assert schema["properties"]["b"]["additionalProperties"] is True
