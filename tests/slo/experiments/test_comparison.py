"""Which variants sustain more, as far as the rates that were simulated tell."""

from __future__ import annotations

import pytest

from actorllm.slo.experiments import sustained, sustained_ratio
from tests.slo.made_results import results_of


def test_a_ratio_to_an_unknown_rate_is_a_bound() -> None:
    results = results_of(
        {
            "a": {1.0: (1000, 1000), 2.0: (1000, 1000), 4.0: (0, 0)},
            "b": {0.5: (1000, 1000), 1.0: (0, 0)},
            "c": {0.8: (0, 0)},
        }
    )
    a, b, c = (sustained(results, label, 0.9, "deadline") for label in "abc")
    assert a is not None
    assert b is not None
    assert c is not None
    assert (a.as_rival, b.as_rival, c.as_rival) == pytest.approx((2.2, 0.55, 0.8))
    known, bound = sustained_ratio(a, b), sustained_ratio(a, c)
    assert known is not None
    assert bound is not None
    assert (known.low, known.value, known.high) == pytest.approx((4.0, 4.0, 4.0))
    assert (bound.low, bound.value) == pytest.approx((2.75, 2.75))
    assert bound.high_is_open
    assert sustained_ratio(c, a) is None, "nothing is known of c but that it is below 0.8"


def test_a_ratio_is_of_the_same_requests_under_both() -> None:
    """The first seed is easy and the second hard for either of them: their rates vary, and the ratio does not."""
    easy_and_hard = {1.0: (1000, 1000), 2.0: (1000, 0), 4.0: (0, 0)}
    results = results_of({"a": {2 * rate: good for rate, good in easy_and_hard.items()}, "b": easy_and_hard})
    a, b = (sustained(results, label, 0.9, "deadline") for label in "ab")
    assert a is not None
    assert b is not None
    assert a.band.high > 1.5 * a.band.low
    ratio = sustained_ratio(a, b)
    assert ratio is not None
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_policy_that_misses_is_not_said_to_have_a_growing_backlog() -> None:
    results = results_of({"a": {1.0: (0, 0), 2.0: (0, 0)}, "b": {1.0: (0, 0), 2.0: (0, 0)}}, growing=(("b", 1.0),))
    found = [sustained(results, label, 0.9, "deadline") for label in "ab"]
    assert [None if one is None else one.verdict for one in found] == ["stationary", "growing"]
