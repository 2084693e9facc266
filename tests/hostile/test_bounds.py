"""The table of what clients can fill is complete and true of the source."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from actorllm.config import ARGUMENTS
from tests.hostile.containers import ROOT, containers

sys.path.insert(0, str(ROOT / "bench"))

import bounds

sys.path.remove(str(ROOT / "bench"))

IN_TABLE = [place for bound in bounds.BOUNDS for place in bound.places]
NOT_FILLED = [place for places in bounds.NOT_FILLED.values() for place in places]
LIMITS = sorted({limit for bound in bounds.BOUNDS for limit in bound.limits})


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return containers()


def test_every_container_is_in_the_table_or_cannot_be_filled(found: dict[str, str]) -> None:
    missing = {place: line for place, line in found.items() if place not in {*IN_TABLE, *NOT_FILLED}}
    assert not missing, "add them to bench/bounds.py: to BOUNDS with what bounds them, or to NOT_FILLED with a reason"


def test_every_place_exists_and_stands_there_once(found: dict[str, str]) -> None:
    told = [*IN_TABLE, *NOT_FILLED]
    assert not set(told) - set(found), "remove them from bench/bounds.py, or correct their names"
    assert len(told) == len(set(told))


def test_every_limit_has_the_value_that_is_told() -> None:
    values = {limit: f"{name}={value_of(name)}" for limit in LIMITS for name, _ in [limit.split("=")]}
    assert [f"{limit} is told, {value} is true" for limit, value in values.items() if value != limit] == []


def value_of(name: str) -> Any:
    """Of a constant ("module:NAME", "module:Class.name", or the size of a cache), or the default of an argument."""
    module, _, path = name.rpartition(":")
    if not module:
        return ARGUMENTS[name]
    found: Any = importlib.import_module(f"actorllm.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    return found.cache_parameters()["maxsize"] if hasattr(found, "cache_parameters") else found


def test_every_row_says_what_bounds_it_and_what_happens() -> None:
    for bound in bounds.BOUNDS:
        assert all((bound.what, bound.places or bound.limits, bound.filled_by, bound.how, bound.at_bound)), bound


def test_the_search_sees_containers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "actorllm" / "x.py"
    source.parent.mkdir()
    source.write_text(
        "seen = {}\nTABLE = {1: 2}\n"
        "@functools.lru_cache(maxsize=3)\ndef f(): ...\n"
        "class A:\n    b: list[int] = field(default_factory=list)\n"
        "    def __init__(self, given: set[int]):\n"
        "        self.c = deque()\n        self.d: dict[str, int] = {}\n        self.e: set[int] = given\n        self.n = 3\n"
    )
    monkeypatch.setattr("tests.hostile.containers.ROOT", tmp_path)
    assert list(containers()) == ["x: seen", "x: f", "x: A.b", "x: A.c", "x: A.d"]
