"""Schemas are rewritten into ones that mean the same, and what cannot be held is named."""

from __future__ import annotations

import copy
import json
import tracemalloc
from fractions import Fraction
from typing import Any

import pytest

from actorllm.text import json_schema
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


def test_places_are_written_only_where_they_are_told() -> None:
    """Each of many alternatives has a place as long as a property's name, and none of them is told."""
    schema = {"properties": {"k" * 20_000: {"anyOf": [{"type": "string"}] * 2_000}}}
    tracemalloc.start()
    try:
        assert held(schema, is_hint=False) == []
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_long_place_is_cut_short() -> None:
    schema = {"properties": {"k" * 1_000: {"items": {"uniqueItems": True}}}}
    assert held(schema, is_hint=True) == [f"uniqueItems (at #/properties/{'k' * 40}.../items)"]


def test_a_chain_of_references_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    follow = json_schema._target

    def counted(schema: Any, reference: str) -> Any:
        followed.append(reference)
        return follow(schema, reference)

    monkeypatch.setattr(json_schema, "_target", counted)
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(300)}
    assert held({"$defs": {**chain, "a300": {"type": "string"}}, "$ref": "#/$defs/a0"}, is_hint=False) == []
    assert len(followed) == 301


@pytest.mark.parametrize("reference", ["#/anyOf/²", "#/anyOf/" + "9" * 5_000, "#/anyOf/٣"])
def test_a_place_that_is_no_number_points_nowhere(reference: str) -> None:
    assert held({"anyOf": [{"$ref": reference}]}, is_hint=True) == []


@pytest.mark.parametrize(
    ("value", "is_held"), [(5e-324, True), (9999e-310, True), (1.25e-7, True), (10001e-310, False), (1e300, False)]
)
def test_the_digits_of_a_multiple_are_counted_in_one_step(
    value: float, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[Any] = []
    times = Fraction.__mul__
    monkeypatch.setattr(Fraction, "__mul__", lambda one, other: products.append(other) or times(one, other))
    assert held({"multipleOf": value}, is_hint=True) == ([] if is_held else ["multipleOf"])
    assert len(products) < 10


@pytest.mark.parametrize("name", ["multipleOf", "minimum", "exclusiveMaximum"])
def test_a_number_that_no_float_holds_is_left_alone(name: str) -> None:
    schema = {"multipleOf": 0.3, name: 10**400}
    assert held(schema, is_hint=False) == []
    assert schema[name] == 10**400
