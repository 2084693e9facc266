"""Pages hold all that they show, are well-formed, and say what the results say."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from actorllm.scheduling.cost_model import LinearModel, Regime, preset
from actorllm.slo.experiments import Point, Scenario, Sweep, SweepResults, Variant
from actorllm.slo.experiments.point import watched_run
from actorllm.slo.experiments.stamp import stamp
from actorllm.slo.journal import Journal
from actorllm.slo.report import run_page, sweep_page
from actorllm.slo.report.charts import Series, lines, ticks
from actorllm.slo.report.lead import lead
from actorllm.slo.report.run_page import predictor
from actorllm.slo.report.sweep_page import _lead, rates_section
from actorllm.slo.simulator import simulate
from actorllm.slo.timeline import timeline_of_streams
from actorllm.slo.workload import assign_classes, fixed_lengths, make_workload
from actorllm.types.objective import SLO, RequestClass
from tests.slo.made_results import results_of

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Checker(HTMLParser):
    """Every tag is closed in order; what a browser would fetch is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "iframe", "object", "embed", "link", "img"):
            self.fetched.append(tag)
        self.fetched += [str(given[name]) for name in ("src", "srcset", "data", "xlink:href") if name in given]
        if given.get("href"):
            self.links.append(str(given["href"]))
        if given.get("id"):
            self.ids.append(str(given["id"]))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}>"


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert checker.fetched == []
    assert all(link.startswith("#") and link[1:] in checker.ids for link in checker.links)
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert "url(" not in html
    charts = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    for chart in charts:
        assert "nan" not in chart
        assert "inf" not in chart.replace("infinity", "")
        ElementTree.fromstring(chart)
    return checker


@pytest.fixture(scope="module")
def results() -> SweepResults:
    scenario = Scenario(workload="synthetic", num_requests=60, tenants=(1.0, 3.0))
    variants = [Variant.parse("fcfs@512"), Variant.parse("edf@512", "edf <& friends>")]
    return Sweep(scenario, variants, (0, 1)).run(
        rates=(3.0, 5.0),
        scales=(1.0, 0.5, 2.0),
        scale_rates=(5.0,),
        targets=(0.9,),
        aggregates=("worst",),
        num_processes=0,
    )


def test_a_sweep_is_one_page_that_needs_nothing_else(results: SweepResults) -> None:
    html = sweep_page(results)
    checker = checked(html)
    assert len(checker.ids) == 9
    assert html.count("<svg") > 20
    for text in (
        "fcfs@512",
        "edf &lt;&amp; friends&gt;",
        "How much each policy sustains",
        "Why request",
        "Jain",
        "tenant-1",
        results.scenario.digest,
        np.__version__,
        "first token in 0.5 s + 1 s per 4,000 prompt tokens, 50 ms per token",
        "prefers-color-scheme: dark",
    ):
        assert text in html, text
    assert "<& friends>" not in html
    best = results.max_rate("edf <& friends>", 0.9, "deadline")
    assert best is not None
    assert f"{best.rate:.2f}" in html


def test_a_policy_without_all_seeds_is_in_no_table_and_no_chart(results: SweepResults) -> None:
    """The page says that it is not compared. Its easy seed would stand beside the means of others."""
    name = "edf <& friends>"
    some = [one for one in results.records if one["variant"]["label"] != name or one["seed"] == 0]
    html = sweep_page(replace(results, records=tuple(some)))
    checked(html)
    assert "Left out: &#39;edf &lt;&amp; friends&gt;&#39; has no rate with more than 1 of the 2 seeds of others" in html
    named = [row for row in html.split("<tr>") if row.startswith("<td>edf &lt;&amp; friends&gt;</td>")]
    cells = {re.sub(r"</?(?:td|tr|tbody|table|div)>", " ", row.partition("</table>")[0]).strip() for row in named}
    assert all(set(cell.removeprefix("edf &lt;&amp; friends&gt;").split()) <= {"–"} for cell in cells), cells
    assert "<summary>edf &lt;&amp; friends&gt;" not in html
    assert "<summary>fcfs@512" in html


def test_a_class_of_a_trace_that_is_promised_nothing_keeps_nothing(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    rows = [
        {"timestamp": number, "input_length": 100, "output_length": 4, "hash_ids": [number]}
        | ({"type_info": "chat", "slo": {"ttft": 9.0}} if number % 2 else {"type_info": "batch"})
        for number in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = Scenario(workload=str(file), num_requests=40, mix=None)
    found = Sweep(scenario, [Variant.parse("fcfs")], (0,)).run(rates=(2.0,), num_processes=0)
    html = sweep_page(found)
    assert "<td>chat</td><td>100%</td><td>100%</td>" in html
    assert "<td>batch</td><td>–</td><td>–</td><td>–</td>" in html


def test_a_sweep_of_which_no_rate_is_whole_has_a_page(results: SweepResults) -> None:
    """It was ended while its last points at the scale of 1 were under way."""
    some = [one for one in results.records if one["scale"] != 1 or one["seed"] == 0]
    found = replace(results, records=tuple(some))
    assert len(found.incomplete()) == 2
    checked(sweep_page(found))


def test_a_sweep_without_any_point_says_so() -> None:
    scenario = Scenario(workload="synthetic", num_requests=60)
    html = sweep_page(SweepResults(scenario, (Variant.parse("fcfs"),), (0,), ()))
    checked(html)
    assert "No point was simulated." in html


def test_a_policy_that_keeps_nothing_has_a_page_as_well() -> None:
    scenario = Scenario(workload="synthetic", num_requests=40, mix="x:1:ttft=0.0001,tpot=0.0001")
    html = sweep_page(Sweep(scenario, [Variant.parse("fcfs")], (0,)).run(rates=(2.0,), num_processes=0))
    checked(html)
    assert "At no rate that was tried" in html
    assert "cannot be met by 40 of 40 requests" in html


def test_a_simulated_run_shows_its_steps_and_how_well_they_are_predicted() -> None:
    point = Point(scenario=Scenario(workload="synthetic", num_requests=60), variant=Variant.parse("edf"), rate=3.0)
    run, journal = watched_run(point)
    html = run_page("A run", run.timeline, run.workload, journal, preset("a100-llama-3-8b"), stamp())
    checked(html)
    errors = "mean absolute error 0% of decode steps and 0% of steps with prompts"
    for text in ("What steps computed", "KV cache in use", errors, "<td>with prompts, ", "60 requests"):
        assert text in html, text


def test_errors_of_step_times_are_told_by_kind_and_size() -> None:
    """Thousands of decode steps are predicted, and the few with prompts are not: a mean over all would be small."""
    workload = assign_classes(make_workload(np.arange(9.0) * 9, fixed_lengths(9, 300, 400)), [(RequestClass("x"), 1)])
    scenario = Scenario(workload="synthetic", num_requests=9)
    journal = Journal()
    shape = scenario.shape
    truth = LinearModel((Regime(math.inf, (0.01, 1e-4, 0, 0, 0, 0)),), "truth")
    run = simulate(workload, shape, truth, make_scheduler=journal.scheduler_maker(shape))
    blind = LinearModel((Regime(math.inf, (0.01, 0, 0, 0, 0, 0)),), "blind")
    told = "".join(predictor(journal, run.timeline, blind, "a note").blocks)
    assert "blind: mean absolute error 0% of decode steps and 75% of steps with prompts, over 1,509 steps." in told
    assert "<td>with prompts, 300 tokens</td><td>9</td><td>75.0%</td><td>-75.0%</td>" in told
    assert "<td>decode, 1 rows</td><td>1,500</td>" in told, "so many of each kind are looked at"
    assert ">a note<" in told


def test_a_run_that_was_watched_from_outside_has_a_page_too() -> None:
    rng = np.random.default_rng(3)
    arrival = np.cumsum(rng.exponential(0.2, 50))
    streams = [at + 0.3 + np.cumsum(rng.uniform(0.01, 0.08, 20)) for at in arrival.tolist()]
    streams[7] = np.zeros(0)
    workload = assign_classes(
        make_workload(arrival, fixed_lengths(50, 100, 20)), [(RequestClass("x", SLO(0.4, 0.05)), 1)]
    )
    timeline = timeline_of_streams(arrival, workload.num_prompt, streams)
    html = run_page("Live", timeline, workload)
    checked(html)
    assert "49 of 50 requests ran to their end" in html
    assert "was watched from outside" in html
    workload = replace(workload, tenant_ids=np.zeros(50, np.int32), tenants=("only",))
    assert "only" in run_page("Live", timeline, workload)


def test_an_empty_run_has_a_page() -> None:
    workload = make_workload(np.zeros(0), fixed_lengths(0, 1, 1))
    timeline = timeline_of_streams(np.zeros(0), np.zeros(0, np.int32), [])
    assert "there were no requests" in run_page("Nothing", timeline, workload)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.3, 0.31), (0.0, 12345.0), (1e-6, 3e-6), (5.0, 5.0)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found
    assert all(low - 1e-12 <= value <= high + 1e-12 for value in found)
    assert found == sorted(set(found))
    assert len(found) <= 12


def test_a_chart_of_nothing_and_of_a_point() -> None:
    assert "nothing to draw" in lines([], "x", "", "")
    checked(lines([Series("one", [2.0], [0.5], [0.4], [0.6])], "x", "", ""))


# The lead ----------------------------------------------------------------------------------------------------------------


def lead_of(
    good_of: dict[str, dict[float, tuple[int, ...]]],
    targets: tuple[float, ...],
    growing: tuple[tuple[str, float], ...] = (),
) -> str:
    """Compared with the first one."""
    return " ".join(lead(results_of(good_of, targets, growing), 1.0, next(iter(good_of))))


def test_the_lead_names_the_targets_that_were_searched_for() -> None:
    """A search for 90 % tells nothing of who keeps 99 %: `cohost` does so above the rate of `edf`, which was not tried."""
    told = lead_of(
        {
            "edf": {0.2: (995, 995), 0.5: (950, 950), 1.0: (500, 500)},
            "cohost": {0.5: (985, 985), 1.0: (970, 970), 2.0: (500, 500)},
        },
        (0.9,),
    )
    assert "99%" not in told
    assert "cohost serves the most: up to 1.15 [1.15, 1.15] requests/s with 90% of the worst class on time" in told
    assert "times as much as edf" in told


def test_a_rate_below_the_lowest_one_tried_is_not_worse() -> None:
    told = lead_of(
        {
            "edf": {0.2: (995, 995), 0.5: (950, 950), 1.0: (500, 500)},
            "cohost": {0.5: (985, 985), 1.0: (970, 970), 2.0: (500, 500)},
        },
        (0.99,),
    )
    assert "no policy is shown to serve the most" in told
    assert "edf 0.233 [0.233, 0.233], cohost < 0.5 requests/s are not told apart" in told


def test_a_tie_is_told_as_a_tie() -> None:
    """Both lead with one of the seeds."""
    told = lead_of(
        {
            "fcfs": {1.0: (700, 700), 2.0: (400, 400), 0.5: (1000, 1000)},
            "edf": {1.0: (990, 990), 2.0: (960, 900), 4.0: (500, 500)},
            "qoserve": {1.0: (990, 990), 2.0: (900, 970), 4.0: (500, 500)},
        },
        (0.9,),
    )
    assert "qoserve 2.16 [2, 2.3], edf 2.14 [2, 2.26] requests/s are not told apart; fcfs serves less" in told
    assert "serves the most:" not in told


def test_a_rate_at_which_the_backlog_grows_does_not_lead() -> None:
    good_of = {
        "fcfs": {1.0: (1000, 1000), 2.0: (1000, 1000), 3.0: (700, 700)},
        "qoserve": {1.0: (1000, 1000), 4.0: (1000, 1000), 6.0: (700, 700)},
    }
    assert "qoserve serves the most: up to 4.67" in lead_of(good_of, (0.9,))
    told = lead_of(good_of, (0.9,), (("qoserve", 4.0), ("qoserve", 6.0)))
    assert "no policy is shown to serve the most" in told
    assert "fcfs 2.33 [2.33, 2.33], qoserve ≥ 1 [1, 4] requests/s are not told apart" in told
    assert "Of qoserve, rates from 4 requests/s on do not count: the backlog grows there." in told


def ratio_cell(good_of: dict[str, dict[float, tuple[int, ...]]], growing: tuple[tuple[str, float], ...] = ()) -> str:
    """How many times the rate of the baseline, `fcfs`, that of `edf` is, as the page has it."""
    found = "".join(rates_section(results_of(good_of, (0.9,), growing)).blocks)
    row = next(row for row in found.split("<tr>") if row.startswith("<td>edf<"))
    return row.split("<td>")[-1].removesuffix("</td></tr>").split("</td>")[0]


def test_ratios_of_the_page_leave_out_what_the_lead_leaves_out() -> None:
    good_of = {
        "fcfs": {1.0: (1000, 1000), 2.0: (1000, 1000), 3.0: (0, 0)},
        "edf": {1.0: (1000, 1000), 2.0: (1000, 1000), 4.0: (1000, 1000), 8.0: (0, 0)},
    }
    assert ratio_cell(good_of).startswith("2.10<br>")
    told = ratio_cell(good_of, (("edf", 4.0),))
    assert told.startswith('0.95 <span class="growing">▲</span><br>'), "edf sustains 2 at least, and less than 4"
    assert "1.90" in told
    good_of["fcfs"] = {3.0: (0, 0), 4.0: (0, 0)}
    assert ratio_cell(good_of).startswith("&gt; 1.47<br>"), "fcfs may sustain anything below 3"


def test_the_page_says_why_a_rate_is_not_known() -> None:
    """At 1 the target is kept while the backlog grows; at 2 it is said what the figure leaves out."""
    good_of = {"fcfs": {1.0: (1000, 1000), 2.0: (1000, 1000)}, "edf": {1.0: (1000, 1000), 2.0: (1000, 1000)}}
    found = "".join(rates_section(results_of(good_of, (0.9,), (("fcfs", 1.0), ("fcfs", 2.0), ("edf", 2.0)))).blocks)
    assert "<td>fcfs</td><td>&lt; 1.00</td>" in found
    assert "&lt; alone: at the lowest rate that was tried the target is not kept, or the backlog grows." in found
    assert "at least 1 requests/s [1, 2], without rates at which the backlog grew" in found


def test_a_policy_alone_serves_neither_more_nor_less() -> None:
    told = lead_of({"fcfs": {1.0: (1000, 1000), 2.0: (0, 0)}}, (0.9,))
    assert "fcfs serves up to 1.1 [1.1, 1.1] requests/s with 90% of the worst class on time" in told
    assert "most" not in told


def test_without_a_search_the_lead_is_of_one_rate() -> None:
    good_of = {"fcfs": {1.0: (700, 720)}, "edf": {1.0: (990, 940)}, "vtc": {1.0: (940, 980)}}
    told = lead_of(good_of, ())
    assert "at 1 requests/s (no highest rate was searched for), edf 96.5%, vtc 96% of the promises" in told
    assert "not told apart" in told
    both = {x: good_of[x] for x in ("fcfs", "edf")}
    assert "edf keeps the most promises" in lead_of(both, ())
    assert "backlog" not in lead_of(both, ())
    growing = lead_of(both, (), (("fcfs", 1.0), ("edf", 1.0)))
    assert "At that rate the backlog of fcfs and edf grows: what a run keeps then depends on how long it is." in growing
    assert lead(results_of(both), 7.0, "fcfs") == [], "nothing was simulated at that rate"


def test_without_a_search_the_lead_is_of_a_rate_at_which_no_backlog_grows() -> None:
    """They differ most at 2, where what a run keeps depends on how long it is."""
    good_of = {"fcfs": {1.0: (950, 950), 2.0: (300, 300)}, "edf": {1.0: (990, 990), 2.0: (900, 900)}}
    told = " ".join(_lead(results_of(good_of, (), (("fcfs", 2.0),))))
    assert "at 1 requests/s (no highest rate was searched for), edf keeps the most promises" in told
    assert "backlog" not in told
    told = " ".join(_lead(results_of(good_of, (), (("fcfs", 1.0), ("fcfs", 2.0)))))
    assert "at 2 requests/s" in told, "there is no other"
    assert "the backlog of fcfs grows" in told


def test_no_policy_that_keeps_the_target() -> None:
    told = lead_of({"fcfs": {1.0: (700, 700), 0.5: (800, 800)}}, (0.9,))
    assert "no policy keeps 90% of the promises" in told
    assert "the lowest is 0.5 requests/s" in told
