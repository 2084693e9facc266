"""Which variants sustain more, as far as the rates that were simulated tell."""

from __future__ import annotations

import pytest

from actorllm.cli.laboratory import _print_sweep
from actorllm.slo.experiments import sustained, sustained_ratio
from actorllm.slo.experiments.comparison import sustained_rate
from actorllm.slo.report.export import latex_table
from actorllm.slo.report.sweep_page import rates_section
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


def test_a_highest_rate_is_one_at_which_no_backlog_grows() -> None:
    """On the terminal, on the page and in the table for papers."""
    good_of = {"fcfs": {1.0: (1000, 1000), 2.0: (0, 0)}, "edf": {1.0: (1000, 1000), 4.0: (1000, 1000), 8.0: (0, 0)}}
    calm, growing = (results_of(good_of, (0.9,), given) for given in ((), (("edf", 4.0), ("edf", 8.0))))
    for label, results in (("edf", calm), ("fcfs", growing)):
        plain, found = results.max_rate(label, 0.9, "deadline"), sustained_rate(results, label, 0.9, "deadline")
        assert plain is not None
        assert found == plain
    found = sustained_rate(growing, "edf", 0.9, "deadline")
    assert found is not None
    assert (found.rate, found.high, found.is_bounded, found.caveats) == (1.0, 4.0, False, ["growing"])
    alone = results_of({"edf": {4.0: (1000, 1000)}}, (0.9,), (("edf", 4.0),))
    assert sustained_rate(alone, "edf", 0.9, "deadline") is None
    page = "".join(rates_section(growing).blocks)
    assert '≥ 1.00 <span class="growing">▲</span>' in page
    assert "4.40" not in page
    assert "4.40" in "".join(rates_section(calm).blocks)
    assert r"$>$\,1$^\dagger$ [1, 4]" in latex_table(growing)


def test_what_is_left_of_rates_may_be_of_a_run_that_was_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the rates at which the backlog grows it may grow as well: both are marked."""
    good_of = {"edf": {1.0: (1000, 1000), 4.0: (1000, 1000), 8.0: (0, 0)}}
    results = results_of(good_of, (0.9,), (("edf", 4.0), ("edf", 8.0)))
    for record in results.records:
        if record["rate"] == 1.0:
            record["stationarity"]["verdict"] = "short"
    found = sustained_rate(results, "edf", 0.9, "deadline")
    assert found is not None
    assert found.caveats == ["growing", "short"]
    page = "".join(rates_section(results).blocks)
    assert '≥ 1.00 <span class="growing">▲</span> <span class="short">○</span>' in page
    assert "without rates at which the backlog grew, too short to see whether its backlog grows" in page
    assert r"$>$\,1$^\dagger$$^\ddagger$ [1, 4]" in latex_table(results)
    _print_sweep(results, (0.9,))
    assert ">1.00*~ [1.00, 4.00]" in capsys.readouterr().out
