"""What papers claim beside what is measured (`bench/slo_science.py`, `bench/policies.py`): ratios are of rates that are sustained,
and no rival is taken for worse than it is known to be."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actorllm.slo.fairness import Fairness
from tests.slo.made_results import results_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import policies
import slo_science

MINE = {1.0: (1000, 1000), 2.0: (1000, 1000), 4.0: (0, 0)}
"""At 90 % it sustains 2.2."""


def test_a_rival_that_fails_at_the_lowest_rate_tried_may_sustain_nearly_that() -> None:
    rivals = {"fcfs 256": {0.5: (1000, 1000), 1.0: (0, 0)}, "fcfs 512": {1.1: (0, 0), 2.0: (0, 0)}}
    results = results_of({"cohost": MINE, **rivals})
    assert slo_science.rival(results, list(rivals), 0.9, "deadline") == "fcfs 512", "0.55 is known of the other"
    (row,) = (one for one in slo_science.ratios_of("code", results) if one["attainment"] == "90% deadline")
    assert (row["best policy"], row["compared with the best"], row["x"]) == ("cohost", "fcfs 512", "> 2.00 (> 2.00)")


def test_rates_at_which_a_backlog_grows_are_left_out_of_a_ratio() -> None:
    results = results_of({"cohost": MINE, "fcfs 512": {1.0: (1000, 1000), 2.0: (0, 0)}}, growing=(("cohost", 2.0),))
    found = slo_science.ratio(results, "cohost", "fcfs 512", 0.9, "deadline")
    assert found.text == "0.91 (0.91 to 1.82), growing rates left out"
    nothing = results_of({"cohost": {1.0: (0, 0)}, "fcfs 512": {1.0: (1000, 1000), 2.0: (0, 0)}})
    assert slo_science.ratio(nothing, "cohost", "fcfs 512", 0.9, "deadline").text == "—"


@pytest.mark.parametrize(("goal", "met"), [(1.5, True), (2.0, "within the band"), (3.0, False)])
def test_a_goal_is_met_if_the_low_end_of_the_band_reaches_it(goal: float, met: bool | str) -> None:
    assert slo_science.is_met(slo_science.Ratio("", 2.1, 1.6, 2.7), goal) == met


def test_a_claim_is_held_against_the_band() -> None:
    verdicts = [
        slo_science.verdict(slo_science.Ratio(text, value, low, high), 1.5, 2.4)
        for text, value, low, high in (
            ("", 2.0, 1.4, 2.6),
            ("", 1.4, 1.2, 1.6),
            ("", 1.2, 1.1, 1.4),
            ("", 3.0, 2.5, 4.0),
            ("> 2.00", 2.0, 1.8, float("inf")),
            ("—", 0.0, 0.0, float("inf")),
        )
    ]
    assert verdicts == ["yes", "within the band", "less", "more", "within the band", "not tested"]


def test_a_gap_between_tenants_that_never_waited_side_by_side_is_not_tested() -> None:
    one, other = (
        Fairness(("a", "b"), (1, 1), (1.0, 1.0), (1.0, 1.0), 1.0, gap, num) for gap, num in ((0.0, 0), (4e3, 3))
    )
    assert slo_science.gap_of([one, one]) == "not tested"
    assert slo_science.gap_of([one, other]) == "4k tokens"


def test_a_capacity_is_a_rate_at_which_no_backlog_grows() -> None:
    others = {"a": {1.0: (1000, 1000), 2.0: (0, 0)}, "b": {1.2: (0, 0)}}
    results = results_of({"x": MINE, "y": {2.0: (0, 0)}, **others}, growing=(("x", 2.0),))
    assert policies.capacity_ratio(results, "a", "b") == (pytest.approx((1.1 / 1.2, 1.1 / 1.2, float("inf"))), [])
    assert policies.capacity_ratio(results, "x", "a") == (pytest.approx((1 / 1.1, 1 / 1.1, 2 / 1.1)), ["x"])
    unknown, _ = policies.capacity_ratio(results, "y", "a")
    assert policies.verdict_on((1.05, 1.3), unknown) == "not tested"
    row = policies.told("paper", "sentence", (1.05, 1.3), "ratio", "load", unknown, "nothing")
    assert (row["here"], row["reproduced"]) == ("not known", "not tested")
    assert (
        policies.told("paper", "sentence", (1.05, 1.3), "ratio", "load", (2.2, 2.0, float("inf")), "")["here"]
        == "> 2.00"
    )


def test_a_load_at_which_nothing_was_tested_is_not_the_best() -> None:
    measured = {1.0: math.nan, 2.0: 0.5, 3.0: math.nan}
    claim = replace(policies.CLAIMS[0], loads=tuple(measured), measure=lambda load, seed, arguments: measured[load])
    row = policies.row_of(claim, argparse.Namespace(seeds=2))
    assert (row["here"], row["reproduced"]) == ("0.50 (0.50 to 0.50)", "yes")
    nothing = policies.row_of(replace(claim, loads=(1.0,)), argparse.Namespace(seeds=2))
    assert (nothing["here"], nothing["reproduced"]) == ("not known", "not tested")


RESULT = Path(slo_science.__file__).parent / "results" / "slo_science.json"


def test_what_follows_from_printed_ratios_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is published, too."""
    known = json.loads(RESULT.read_text())
    wrong = {
        key: [row | {column: "?"} for row in known[key]]
        for key, column in (("targets", "met"), ("claims", "reproduced"))
    }
    file = tmp_path / "result.json"
    file.write_text(json.dumps(known | wrong))
    monkeypatch.setattr(sys, "argv", ["slo_science.py", "--derive", "--json", str(file)])
    slo_science.main()
    assert json.loads(file.read_text()) == known
    of_strict = slo_science.derived({"strict": [{"target": "≥ 2", "x": "2.50 (2.10 to 3.00)", "met": "?"}]})
    assert of_strict["strict"][0]["met"] is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.71 (1.58 to 1.96)", (1.71, 1.58, 1.96)),
        ("1.81 (1.54 to > 2.08), growing rates left out", (1.81, 1.54, math.inf)),
        ("> 2.00 (> 1.80)", (2.0, 1.8, math.inf)),
        ("> 7.9", (7.9, 0.0, math.inf)),
        ("—", (0.0, 0.0, math.inf)),
    ],
)
def test_a_ratio_is_read_as_it_is_printed(text: str, expected: tuple[float, float, float]) -> None:
    assert slo_science.printed_ratio(text) == (text, *expected)
