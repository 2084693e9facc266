"""Bisection on functions whose crossing is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from actorllm.errors import ConfigError
from actorllm.slo.experiments.search import Ladder, search

LADDER = Ladder(4.0, 0.03)


def run(function: Callable[[float], float], target: float, known: dict[int, float]) -> tuple[int | None, int, int]:
    """The result, and how many rates were asked for."""
    steps, num = search(LADDER, target, known), 0
    try:
        rung = next(steps)
        while True:
            num += 1
            assert rung not in known, "asked for what it knew"
            known[rung] = function(LADDER.rate(rung))
            rung = steps.send(known[rung])
    except StopIteration as stop:
        low, high = stop.value
        return low, high, num


@pytest.mark.parametrize("capacity", [0.3, 1.0, 3.99, 4.0, 4.01, 5.0, 17.3, 60.0])
@pytest.mark.parametrize("target", [0.99, 0.9, 0.5])
def test_the_crossing_of_a_monotone_function_is_found(capacity: float, target: float) -> None:
    def attained(rate: float) -> float:
        return 1 / (1 + (rate / capacity) ** 8)

    crossing = capacity * (1 / target - 1) ** (1 / 8)
    low, high, num = run(attained, target, {})
    if crossing < 4.0 / 16:
        assert low is None
        assert high == -LADDER.last
        return
    assert low is not None
    assert high == low + 1
    assert LADDER.rate(low) <= crossing * (1 + 1e-9)
    assert LADDER.rate(high) >= crossing * (1 - 1e-5)
    assert num <= 14


def test_what_another_search_asked_for_is_not_asked_for_again() -> None:
    known: dict[int, float] = {}
    _, _, first = run(lambda rate: math.exp(-rate / 10), 0.5, known)
    _, _, again = run(lambda rate: math.exp(-rate / 10), 0.5, known)
    _, _, other = run(lambda rate: math.exp(-rate / 10), 0.55, known)
    assert again == 0
    assert 0 < other < first


def test_the_ends_of_the_ladder() -> None:
    assert run(lambda rate: 1.0, 0.9, {})[:2] == (LADDER.last, LADDER.last)
    assert run(lambda rate: 0.0, 0.9, {})[:2] == (None, -LADDER.last)


def test_a_ladder_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="positive rate, not at 0"):
        Ladder(0.0)
    with pytest.raises(ConfigError, match=r"step=0\.0 "):
        Ladder(1.0, 0.0)
