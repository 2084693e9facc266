"""Figures of a run, on streams that are written down by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from actorllm.slo.metrics import (
    arrival_window,
    evaluate,
    experience,
    fluidity,
    good,
    jain,
    max_concurrent,
    max_tokens_per_second,
    overrun,
    percentiles,
)
from actorllm.slo.objectives import Promises
from actorllm.slo.timeline import ABORTED, FINISHED, UNFINISHED, RunTimeline, Spans, timeline_of_streams
from actorllm.types.objective import SLO, RequestClass


def make_timeline() -> RunTimeline:
    """Four requests: smooth and early; early with a pause; late and fast; without a token."""
    streams = [
        np.array([0.5, 0.6, 0.7, 0.8]),
        np.array([1.1, 1.2, 2.0, 2.1]),
        np.array([4.0, 4.01, 4.02]),
        np.zeros(0),
    ]
    arrivals = np.array([0.0, 1.0, 2.0, 3.0])
    return timeline_of_streams(arrivals, np.array([10, 10, 10, 10], np.int32), streams)


def test_columns_of_streams() -> None:
    timeline = make_timeline()
    assert timeline.ttft[:3].tolist() == pytest.approx([0.5, 0.1, 2.0])
    assert timeline.tpot[:3].tolist() == pytest.approx([0.1, 1 / 3, 0.01])
    assert timeline.token_times(1).tolist() == [1.1, 1.2, 2.0, 2.1]
    assert timeline.token_times(3).tolist() == []
    assert timeline.duration == pytest.approx(4.02)


def test_every_gap_is_counted_once_and_none_between_requests() -> None:
    values, counts = make_timeline().gaps()
    gaps = np.sort(np.repeat(values, counts)).tolist()
    assert gaps == pytest.approx(sorted([0.1, 0.1, 0.1, 0.1, 0.8, 0.1, 0.01, 0.01]))


def test_gaps_of_a_long_run_are_rounded_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    streams = [np.cumsum(rng.uniform(0.001, 0.1, rng.integers(1, 60))) for _ in range(40)]
    streams[3] = np.array([1.0, 14.5, 15.0])
    timeline = timeline_of_streams(np.zeros(40), np.ones(40, np.int32), streams)
    exact = np.repeat(*timeline.gaps())
    monkeypatch.setattr("actorllm.slo.timeline.MANY_STEPS", 100)
    values, counts = timeline.gaps()
    rounded = np.repeat(values, counts)
    assert values.size < exact.size or counts.max() == 1
    assert np.sort(rounded) == pytest.approx(np.sort(exact), abs=5.1e-7)


def test_gaps_of_many_replicas_are_rounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has few steps, and all of them have many: there is one table of gaps, and not one for each."""
    rng = np.random.default_rng(4)
    streams = [[np.cumsum(rng.integers(1, 20, 30)) / 1000 + 1e-7 * number for _ in range(9)] for number in range(4)]
    parts = [timeline_of_streams(np.zeros(9), np.ones(9, np.int32), one) for one in streams]
    spans = [one.spans for one in parts]
    every = Spans.sorted(
        np.concatenate([one.request + 9 * number for number, one in enumerate(spans)]),
        np.repeat(np.arange(4, dtype=np.int32), 9),
        np.concatenate([one.first_step for one in spans]),
        np.concatenate([one.count for one in spans]),
    )
    timeline = replace(parts[0], spans=every, step_ends=tuple(one.step_ends[0] for one in parts))
    exact = np.repeat(*timeline.gaps())
    assert exact.size == 4 * 9 * 29
    monkeypatch.setattr("actorllm.slo.timeline.MANY_STEPS", 1000)
    assert all(ends.size < 1000 for ends in timeline.step_ends)
    values, counts = timeline.gaps()
    assert values.size <= 19 < np.unique(exact).size
    assert np.sort(np.repeat(values, counts)) == pytest.approx(np.sort(exact), abs=5.1e-7)


def test_the_two_readings_differ_where_they_should() -> None:
    timeline = make_timeline()
    slo = SLO(ttft=1.0, tpot=0.2)
    promises, nothing = (Promises.of([one] * 4) for one in (slo, None))
    assert good(timeline, promises, "tpot").tolist() == [True, False, False, False]
    assert good(timeline, promises, "deadline").tolist() == [True, True, False, False], "due at 2.6, there at 2.1"
    assert good(timeline, nothing, "tpot").tolist() == [True, True, True, False]


def test_requests_are_there_in_whole_seconds() -> None:
    """As `vllm bench serve` counts: who ends at 5.1 and who comes at 5.9 were there in the same second."""
    arrival = np.array([2.5, 3.4, 5.4, 8.6])
    timeline = timeline_of_streams(
        arrival, np.ones(4, np.int32), [np.array([5.1]), np.array([3.45, 5.3]), np.array([5.41]), np.zeros(0)]
    )
    assert max_concurrent(timeline) == 3
    assert max_tokens_per_second(timeline) == 3.0


@pytest.mark.parametrize("reading", ["tpot", "deadline"])
def test_columns_judge_as_single_requests_do(reading: str) -> None:
    rng = np.random.default_rng(3)
    streams = [np.sort(rng.uniform(0, 4, rng.integers(1, 9))) + i / 10 for i in range(200)]
    timeline = timeline_of_streams(np.arange(200) / 10, rng.integers(1, 3000, 200).astype(np.int32), streams)
    for slo in (SLO(1, 0.4), SLO(None, 0.4), SLO(0.5, None, 3.0, 1e-3), SLO(e2e=3)):
        judged = good(timeline, Promises.of([slo] * 200), reading)  # type: ignore[arg-type]
        single = [
            slo.is_met(
                arrival=float(timeline.arrival[i]),
                first_token=float(timeline.first_token[i]),
                last_token=float(timeline.last_token[i]),
                num_prompt=int(timeline.num_prompt[i]),
                num_output=int(timeline.num_output[i]),
                reading=reading,  # type: ignore[arg-type]
            )
            for i in range(200)
        ]
        assert judged.tolist() == single
        assert 0 < sum(single) < 200


def test_fluidity_carries_slack_and_starts_anew_after_a_miss() -> None:
    slo = SLO(ttft=1.0, tpot=0.1)
    assert fluidity(np.array([0.2, 0.9, 1.15]), slo, 0.0, 1) == 1.0
    assert fluidity(np.array([0.2, 1.2, 1.25, 1.36]), slo, 0.0, 1) == 0.75, "one miss; from 1.2 on in time again"
    assert fluidity(np.array([1.5, 2.0, 2.5]), slo, 0.0, 1) == 0.0
    assert fluidity(np.array([9.0, 9.1]), SLO(tpot=0.2), 0.0, 1) == 1.0, "no promise for the first token"


def test_attainment_by_class_and_the_worst_of_them() -> None:
    timeline = make_timeline()
    classes = (RequestClass("chat", SLO(1.0, 0.2), True), RequestClass("batch", SLO(e2e=5.0)), RequestClass("nobody"))
    metrics = evaluate(timeline, classes, np.array([0, 0, 1, 1]), with_fluidity=True, tenants=np.array([0, 0, 1, 1]))
    chat, batch = metrics.classes
    assert (chat.name, chat.num_requests, batch.name, batch.num_requests) == ("chat", 2, "batch", 2)
    assert chat.attainment == {"tpot": 0.5, "deadline": 1.0}
    assert batch.attainment == {"tpot": 0.5, "deadline": 0.5}, "who got nothing is not good"
    assert metrics.worst("deadline") == 0.5
    assert chat.fluidity == 1.0, "the pause is within the slack of the first token"
    everybody = evaluate(timeline, (RequestClass("chat", SLO(5.0, 1.0)),), with_fluidity=True)
    assert everybody.overall.fluidity == 0.75, "who got nothing had no token in time"
    summary = metrics.summary
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (3, 1, 11)
    assert summary["request_goodput"] == pytest.approx(2 / 4.02)
    assert summary["actorllm_goodput_deadline"] == pytest.approx(3 / 4.02)
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * (0.5 + 0.1 + 2.0) / 3)
    assert summary["p99_itl_ms"] == pytest.approx(1e3 * np.percentile([0.1] * 5 + [0.8, 0.01, 0.01], 99))
    assert json.loads(json.dumps(metrics.to_dict(), allow_nan=False))["actorllm_classes"]["chat"]["requests"] == 2


def test_goodput_by_window_and_with_the_drain_are_named_apart() -> None:
    """Ten requests a second for 100 s; those of the odd seconds wait until a drain of 100 s. Half of them are good: 5 of 10 a
    second, and not the 2.5 that a division by everything until the last end gives. The first 20 s, in which all are good
    because the engine is empty, do not count."""
    arrival = np.arange(1000) / 10
    is_late = (arrival >= 20) & (arrival.astype(int) % 2 == 1)
    ends = np.where(is_late, 200.0, arrival + 0.5)
    timeline = timeline_of_streams(arrival, np.full(1000, 10, np.int32), [np.array([end]) for end in ends])
    metrics = evaluate(timeline, (RequestClass("chat", SLO(ttft=1.0)),))
    assert arrival_window(timeline) == pytest.approx((19.98, 99.9))
    assert metrics.overall.window_goodput["tpot"] == pytest.approx(5.0, rel=0.01)
    assert metrics.overall.goodput["tpot"] == pytest.approx(3.0, rel=0.01)
    assert metrics.summary["actorllm_goodput_window_deadline"] == metrics.overall.window_goodput["deadline"]
    nothing = evaluate(timeline_of_streams(np.zeros(0), np.zeros(0, np.int32), []), (RequestClass("chat"),))
    assert nothing.overall.window_goodput == {"tpot": 0.0, "deadline": 0.0}


def test_who_gave_up_is_not_good_however_early_the_tokens_were() -> None:
    timeline = make_timeline()
    timeline.outcome[0] = ABORTED
    metrics = evaluate(timeline, (RequestClass("x", SLO(ttft=1.0)),), with_gaps=True)
    assert metrics.overall.attainment["tpot"] == 0.25
    assert timeline.outcome[1] == FINISHED
    gaps = [0.1, 0.8, 0.1, 0.01, 0.01]
    for figures in (metrics.summary, metrics.overall.gaps_ms):
        assert figures["mean_itl_ms"] == pytest.approx(1e3 * np.mean(gaps)), "of those that finished, as the others"


def test_who_got_nothing_has_overrun_by_what_it_waited() -> None:
    """The last one has no token, and the run ends at 4.02."""
    timeline = make_timeline()
    slo = Promises.of([SLO(ttft=0.5, e2e=10.0)] * 4)
    assert overrun(timeline, slo).tolist() == pytest.approx([1.0, 0.2, 4.0, 1.02 / 0.5])
    timeline.outcome[:] = [FINISHED, UNFINISHED, ABORTED, ABORTED]
    timeline.end[[1, 2, 3]] = [np.nan, 4.02, 8.0]
    ends = Promises.of([SLO(e2e=2.0)] * 4)
    assert overrun(timeline, ends).tolist() == pytest.approx([0.4, 7.0 / 2, 2.02 / 2, 5.0 / 2])
    metrics = evaluate(timeline, (RequestClass("x", SLO(e2e=2.0)),))
    assert metrics.overall.worst_miss == pytest.approx(3.5)


def test_percentiles_of_counted_values_are_those_of_the_repeated_ones() -> None:
    rng = np.random.default_rng(1)
    values, counts = rng.normal(size=50), rng.integers(0, 5, 50)
    percents = [0, 1, 37.5, 50, 99, 100]
    assert percentiles(values, counts, percents) == pytest.approx(np.percentile(np.repeat(values, counts), percents))


def test_nothing_is_no_error() -> None:
    empty = timeline_of_streams(np.zeros(0), np.zeros(0, np.int32), [])
    metrics = evaluate(empty)
    assert metrics.summary["completed"] == 0
    assert metrics.to_dict()["mean_ttft_ms"] is None


def test_fairness_of_shares() -> None:
    assert jain([3, 3, 3]) == 1.0
    assert jain([1, 0, 0, 0]) == 0.25


def test_the_experience_of_a_reader_is_what_is_read_of_what_should_have_been() -> None:
    """Four tokens, one a second from 1 s on: due at 1, 2, 3, 4."""
    slo = SLO(ttft=1.0, tpot=1.0)

    def told(*times: float) -> float:
        return experience(np.array(times), slo, 0.0, 5)

    assert told(1, 2, 3, 4) == told(0.1, 0.2, 0.3, 0.4) == 1.0, "no reader is faster than its own pace"
    assert told(1.1, 1.2, 1.3, 4.0) > told(1.5, 2.5, 3.5, 4.5) > told(11, 12, 13, 14)
    # Read at 3, 4, 5, 6, the end is 7: (4 + 3 + 2 + 1) of (6 + 5 + 4 + 3).
    assert told(3, 3, 3, 3) == pytest.approx(10 / 18)
    assert told(3, 4, 5, 6) == pytest.approx(10 / 18)
    assert told() == 0.0
    assert experience(np.array([9.0]), SLO(e2e=1.0), 0.0, 5) == 1.0, "nothing is promised of the pace"
