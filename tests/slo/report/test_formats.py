"""What other programs read: vLLM's JSON, CSV, and a trace."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.scheduling.cost_model import LinearModel, Regime
from actorllm.slo.experiments import Scenario, Sweep, Variant
from actorllm.slo.experiments.record import figures_of
from actorllm.slo.fairness import fairness_of
from actorllm.slo.journal import Journal
from actorllm.slo.report import bench_json, chrome_trace, requests_csv, results_csv
from actorllm.slo.report.formats import late_tokens
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.timeline import timeline_of_streams
from actorllm.slo.workload import assign_classes, make_workload
from actorllm.types.objective import SLO, RequestClass
from tests.slo.report.bench_keys import BENCH_KEYS

SHAPE = EngineShape(
    num_blocks=128, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048, depth=1, enable_prefix_caching=False
)
SECOND = LinearModel((Regime(float("inf"), (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),), "constant")


def run(*rows: tuple[float, int, int], slo: SLO = SLO(1.5, 1.2)) -> tuple[SimulatedRun, Journal]:  # noqa: B008 - frozen
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    workload = make_workload(arrival.astype(float), (prompt.astype(np.int32), output.astype(np.int32)))
    workload = assign_classes(workload, [(RequestClass("ls", slo, True), 1)])
    journal = Journal()
    return simulate(workload, SHAPE, SECOND, make_scheduler=journal.scheduler_maker(SHAPE)), journal


def test_keys_are_those_of_vllm_and_ours_say_so() -> None:
    found, _ = run((0.0, 10, 3), (0.5, 20, 1), (30.0, 5, 2))
    summary = figures_of(found.timeline, found.workload)["summary"]
    told = bench_json(found.timeline, found.workload, summary, model="constant", warnings=found.warnings)
    assert {key for key in told if not key.startswith("actorllm_")} == BENCH_KEYS
    plain = json.loads(json.dumps(told, allow_nan=False))
    assert (plain["model_id"], plain["num_prompts"], plain["request_rate"]) == ("constant", 3, 2 / 30)
    assert plain["input_lens"] == [10, 20, 5]
    assert plain["itls"] == [[1.0, 1.0], [], [1.0]]
    assert plain["ttfts"] == [1.0, 1.5, 1.0]
    assert plain["latencies"] == [3.0, 1.5, 2.0]
    assert plain["queue_times"] == [0.0, 0.0, 0.0], "of vLLM's client, which never waits here"
    assert plain["actorllm_queue_times"] == [0.0, 0.5, 0.0]
    assert plain["errors"] == ["", "", ""]
    assert (plain["max_output_tokens_per_s"], plain["max_concurrent_requests"]) == (2.0, 2)
    assert plain["actorllm_classes_of"] == ["ls"] * 3


def test_the_gaps_of_single_requests_and_a_row_for_each_of_them() -> None:
    """Two requests decode side by side, and the prompts of a third one hold them up once."""
    found, _ = run((0.0, 10, 6), (0.1, 10, 1), (1.5, 700, 3))
    assert found.timeline.pauses[[0, 2]].tolist() == pytest.approx([1.0, 1.0])
    assert np.isnan(found.timeline.pauses[1])
    summary = figures_of(found.timeline, found.workload, with_gaps=True)["summary"]
    assert summary["actorllm_p99_itl_p99_ms"] == pytest.approx(1000)
    assert summary["actorllm_classes"]["ls"]["p50_itl_ms"] == pytest.approx(1000)
    assert summary["actorllm_classes"]["ls"]["worst_miss"] == pytest.approx(float(np.max(found.timeline.ttft)) / 1.5)
    told = bench_json(found.timeline, found.workload, summary)
    assert told["actorllm_itl_p99s"] == [1.0, None, 1.0]
    rows = list(csv.DictReader(io.StringIO(requests_csv(found.timeline, found.workload, ["a", None, "c"]))))
    assert [row["request_id"] for row in rows] == ["a", "", "c"]
    assert [row["itl_p99"] for row in rows] == ["1.0", "", "1.0"]
    assert {row["good_tpot"] for row in rows} == {"True", "False"}


def test_the_99th_percentile_of_gaps_is_that_of_numpy() -> None:
    rng = np.random.default_rng(3)
    streams = [np.cumsum(rng.exponential(1.0, size)) for size in (2, 3, 50, 150, 1)]
    timeline = timeline_of_streams(np.zeros(5), np.ones(5, np.int32), streams)
    wanted = [np.percentile(np.diff(stream), 99) for stream in streams[:-1]]
    assert timeline.pauses[:-1].tolist() == pytest.approx(wanted)
    values, counts = timeline.gaps(np.array([True, False, False, False, False]))
    assert (values.tolist(), counts.tolist()) == (pytest.approx(np.diff(streams[0]).tolist()), [1])


def test_a_row_for_every_point() -> None:
    scenario = Scenario(workload="synthetic", num_requests=30)
    results = Sweep(scenario, [Variant.parse("fcfs,name=x@512")], (0, 1)).run(rates=(2.0, 3.0), num_processes=0)
    rows = list(csv.DictReader(io.StringIO(results_csv(results))))
    assert [(row["policy"], float(row["rate"]), int(row["seed"])) for row in rows] == [
        ("fcfs,name=x@512", rate, seed) for rate in (2.0, 3.0) for seed in (0, 1)
    ]
    assert all(0 <= float(row["worst_tpot"]) <= 1 and float(row["mean_ttft_ms"]) > 0 for row in rows)
    assert rows[0]["scenario"] == scenario.digest
    assert {row["verdict_of_seeds"] for row in rows} == {"short"}
    # One run that looks as if it grew does not make a rate of many seeds growing: the page says so, and the table.
    records = [r | {"stationarity": {"verdict": "stationary", "message": "", "drift": 0.0}} for r in results.records]
    records[0] |= {"stationarity": {"verdict": "growing", "message": "", "drift": 0.06}}
    told = csv.DictReader(io.StringIO(results_csv(replace(results, records=tuple(records)))))
    assert [(row["verdict"], row["verdict_of_seeds"]) for row in told][:2] == [
        ("growing", "stationary"),
        ("stationary", "stationary"),
    ]


def slices(trace: dict[str, Any], tid: int) -> list[tuple[str, float, float]]:
    return [
        (event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == 0 and event["tid"] == tid
    ]


def test_the_trace_of_a_run_that_was_made_by_hand() -> None:
    found, journal = run((0.0, 600, 2), (0.5, 10, 3))
    trace = json.loads(json.dumps(chrome_trace(found.timeline, found.workload, journal), allow_nan=False))
    assert slices(trace, 0)[:4] == [
        ("queued", 0.0, 0.0),
        ("prefill 256", 0.0, 1.0),
        ("prefill 246", 1.0, 1.0),
        ("prefill 98", 2.0, 1.0),
    ]
    assert slices(trace, 1)[:2] == [("queued", 0.5, 0.5), ("prefill 10", 1.0, 1.0)]
    assert slices(trace, 1)[2] == ("decode", 2.0, 2.0)
    late = [(e["name"], e["tid"], e["ts"] / 1e6) for e in trace["traceEvents"] if e["ph"] == "i"]
    assert late == [("late: first token", 0, 3.0)], "and what follows is late with it"
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert [(event["name"], event["args"]["prompt_tokens"], event["args"]["decode_rows"]) for event in steps] == [
        ("prefill step", 256, 0),
        ("prefill step", 256, 0),
        ("mixed step", 98, 1),
        ("decode step", 0, 2),
    ]
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert counters == {"batch", "requests", "KV"}
    arrows = [(e["ph"], e["id"], e["pid"], e["ts"] / 1e6) for e in trace["traceEvents"] if e["ph"] in "stf"]
    assert arrows == [
        ("s", 0, 0, 0.0),
        *(("t", 0, 1, at) for at in (0.5, 1.5, 2.5)),
        ("f", 0, 1, 3.5),
        ("s", 1, 0, 0.5),
        ("t", 1, 1, 1.5),
        ("f", 1, 1, 3.5),
    ], "from where it waits through the steps of its prompt to that of its last token"


def test_a_preemption_is_in_the_trace() -> None:
    found, journal = run((0.0, 1000, 100), (0.0, 1000, 100))
    track = slices(chrome_trace(found.timeline, found.workload, journal), 1)
    names = [name.partition(" ")[0] for name, _, _ in track]
    assert names[0] == "queued"
    assert names.count("preempted") == 1
    assert names.count("decode") == 2
    at = names.index("preempted")
    assert track[at][2] > 20
    assert all(duration >= 0 for _, _, duration in track)


def test_who_never_started_is_queued_to_the_end_of_the_run() -> None:
    workload = make_workload(np.array([0.0, 0.5]), (np.array([10, 10], np.int32), np.array([50, 1], np.int32)))
    cut = simulate(workload, replace(SHAPE, max_num_seqs=1), SECOND, until=30.0)
    assert slices(chrome_trace(cut.timeline, cut.workload), 1) == [("queued", 0.5, cut.timeline.last - 0.5)]
    assert cut.timeline.last == 29.0


def test_a_run_that_was_watched_from_outside_has_a_track_for_each_request() -> None:
    timeline = timeline_of_streams(
        np.array([0.0, 1.0]),
        np.array([5, 5], np.int32),
        [np.array([0.5, 0.6]), np.array([1.5])],
        scheduled=np.array([0.2, 1.2]),
    )
    workload = make_workload(timeline.arrival, (timeline.num_prompt, timeline.num_output))
    trace = chrome_trace(timeline, workload)
    assert [name for name, _, _ in slices(trace, 0)] == ["queued", "prefill", "decode"]
    assert [name for name, _, _ in slices(trace, 1)] == ["queued", "prefill"]


def test_a_stretch_of_late_tokens_is_marked_once() -> None:
    times = np.array([0.5, 0.6, 2.0, 2.1, 2.2, 2.25])
    assert late_tokens(SLO(1.0, 0.2), times, 0.0, 10) == [(2.0, "token 2")]
    assert late_tokens(SLO(0.3), times, 0.0, 10) == [(0.5, "first token")]
    assert late_tokens(None, times, 0.0, 10) == []


def test_tenants_that_get_the_same_and_one_that_does_not() -> None:
    num = 200
    arrival = np.arange(num) * 0.1
    ids = (np.arange(num) % 2).astype(np.int32)
    workload = make_workload(arrival, (np.full(num, 100, np.int32), np.full(num, 10, np.int32)))
    workload = replace(workload, tenant_ids=ids, tenants=("a", "b"))

    def served(wait_of_b: float) -> Any:
        """Of b only the first half is ever served."""
        start = arrival + np.where(ids == 1, wait_of_b, 1.0)
        streams = [
            s + np.linspace(0.1, 1.0, 10) if wait_of_b == 1 or i < num // 2 or ids[i] == 0 else np.zeros(0)
            for i, s in enumerate(start.tolist())
        ]
        scheduled = np.where([s.size > 0 for s in streams], start, np.nan)
        timeline = timeline_of_streams(arrival, workload.num_prompt, streams, scheduled=scheduled)
        fair = fairness_of(timeline, workload)
        told = figures_of(timeline, workload)["summary"]["actorllm_jain_of_tenants"]
        assert fair is not None
        assert told == pytest.approx(fair.jain), "one name, one number"
        return fair

    even, uneven = served(1.0), served(3.0)
    assert even.jain == pytest.approx(1.0)
    assert even.service == (12_000.0, 12_000.0)
    assert even.num_windows > 40
    assert even.gap < 250, "a request or two in a window"
    assert uneven.jain < 0.95
    assert uneven.gap > even.gap
    assert uneven.queue_p99_s[1] == pytest.approx(3.0)
    assert fairness_of(timeline_of_streams(arrival, workload.num_prompt, [arrival[i : i + 1] for i in range(num)]),
                       replace(workload, tenant_ids=None, tenants=())) is None  # fmt: skip
