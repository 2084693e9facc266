"""bench/models.py measures in several calls what does not fit into one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import models  # noqa: E402
from sides import SideError  # noqa: E402

sys.path.remove(str(ROOT / "bench"))


class FakeSide:
    """Takes as long as the clock of the test says, and fails where it is told to."""

    now = 0.0
    start_s, call_s = 20.0, 1.0
    broken: tuple[str, ...] = ()

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name
        self.hello = {"versions": {}}

    def start(self) -> FakeSide:
        FakeSide.now += self.start_s
        if self.name in self.broken:
            raise SideError("it does not start")
        return self

    def call(self, do: str, **arguments: Any) -> Any:
        FakeSide.now += self.call_s
        if do == "ceiling":
            return 1e12
        count = len(arguments["prompts"])
        return {"seconds": 0.1 * arguments["output"], "first_tokens": [1] * count}

    def close(self) -> None:
        """Nothing runs."""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., bool]:
    """One call of the benchmark, of two models and two rounds. Returns whether all is there."""
    monkeypatch.setattr(models, "Side", FakeSide)
    monkeypatch.setattr(models, "make_folder", lambda *_: tmp_path)
    monkeypatch.setattr(models.time, "monotonic", lambda: FakeSide.now)

    def call(found: dict[str, Any], budget: float | None = None) -> bool:
        arguments = argparse.Namespace(
            shapes="llama-135M,qwen3-0.6B",
            rounds=2,
            output=64,
            threads=1,
            models=tmp_path,
            peer_python_vllm=None,
            peer_python_other=None,
            state=None if budget is None else tmp_path / "state.json",
            budget=budget,
        )
        began = FakeSide.now
        rows: list[dict[str, Any]] = []
        is_complete = models.measure(arguments, found, rows)
        assert budget is None or FakeSide.now - began <= budget
        return is_complete

    return call


def test_rounds_that_are_there_are_not_measured_again(call: Callable[..., bool]) -> None:
    """A call ends before the round that would be too long, and the next one goes on there."""
    at_once: dict[str, Any] = {}
    assert call(at_once)
    found: dict[str, Any] = {}
    calls = 0
    while not call(found, budget=100.0):
        calls += 1
        assert calls < 10
    assert calls == 3
    assert {name: of["rounds"] for name, of in found.items()} == {name: of["rounds"] for name, of in at_once.items()}
    before = FakeSide.now
    assert call(found, budget=100.0)
    assert FakeSide.now == before


def test_a_side_that_does_not_start_is_left_out(call: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSide, "broken", (models.CONTINUOUS,))
    found: dict[str, Any] = {}
    assert call(found)
    assert found["llama-135M"]["not_measured"] == {models.CONTINUOUS: "it does not start"}
    assert set(found["llama-135M"]["rounds"]) == {"actorllm", "transformers"}
