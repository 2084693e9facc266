"""The verdict, on queues with one server that are built by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actorllm.slo.experiments.stationarity import backlog, judge, together
from actorllm.slo.objectives import Promises
from actorllm.slo.timeline import RunTimeline, timeline_of_streams
from actorllm.slo.workload import bursty_arrivals
from actorllm.types.objective import SLO, RequestClass


def one_server(utilization: float, num: int, seed: int, *, cv: float = 1.0) -> RunTimeline:
    """Requests that are served one after the other, each for a second."""
    rng = np.random.default_rng(seed)
    shape = cv**-2
    arrival = np.cumsum(rng.gamma(shape, 1 / shape, num)) / utilization
    ends = np.empty(num)
    free = 0.0
    for row, at in enumerate(arrival.tolist()):
        free = max(free, at) + 1.0
        ends[row] = free
    return timeline_of_streams(arrival, np.full(num, 10, np.int32), [np.array([end]) for end in ends.tolist()])


def bursts(utilization: float, seed: int) -> RunTimeline:
    """The same with services that differ, and phases without arrivals."""
    rng = np.random.default_rng(seed)
    arrival = bursty_arrivals(2000, 1.0, seed=seed) / utilization
    ends, free = np.empty(2000), 0.0
    for row, (at, service) in enumerate(zip(arrival.tolist(), rng.exponential(1.0, 2000).tolist(), strict=True)):
        free = max(free, at) + service
        ends[row] = free
    return timeline_of_streams(arrival, np.full(2000, 10, np.int32), [np.array([end]) for end in ends.tolist()])


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_a_server_that_keeps_up_is_stationary(cv: float) -> None:
    verdicts = [judge(one_server(0.7, 2000, seed, cv=cv)).verdict for seed in range(30)]
    assert verdicts.count("stationary") >= 27, "one in a hundred would be a growth by chance; bursts allow a few more"


@pytest.mark.parametrize("utilization", [1.15, 1.5, 3.0])
def test_a_server_that_falls_behind_is_found(utilization: float) -> None:
    for seed in range(20):
        found = judge(one_server(utilization, 2000, seed))
        assert found.verdict == "growing"
        assert found.drift == pytest.approx(1 - 1 / utilization, abs=0.08)
        assert "of what arrived: more than the engine can take" in found.message


def test_bursts_that_may_be_chance_prove_nothing() -> None:
    """Half as many requests again as the server can take, in a few bursts: not significant, and not stationary either."""
    verdicts = []
    for seed in range(30):
        found = judge(bursts(1.5, seed))
        assert found.verdict != "short" or "too bursty to tell that from chance" in found.message
        verdicts.append(found.verdict)
    assert verdicts.count("stationary") <= 3
    assert verdicts.count("growing") >= 5


def test_growth_that_only_tokens_show_is_found() -> None:
    """Short requests overtake long ones, which wait for ever: few requests, many tokens."""
    num = 1000
    arrival = np.arange(num, dtype=float)
    is_long = np.arange(num) % 50 == 49
    ends = np.where(is_long, 1e6, arrival + 0.5)
    timeline = timeline_of_streams(arrival, np.where(is_long, 8000, 50).astype(np.int32), [np.array([e]) for e in ends])
    found = judge(timeline)
    assert found.verdict == "growing"
    assert "tokens" in found.message


def test_a_run_shorter_than_its_promises_proves_nothing() -> None:
    timeline = one_server(0.7, 300, 1)
    assert judge(timeline, (RequestClass("be", SLO(e2e=60.0)),)).verdict == "stationary"
    found = judge(timeline, (RequestClass("be", SLO(e2e=600.0)), RequestClass("ls", SLO(0.5, 0.05))))
    assert found.verdict == "short"
    assert "the 600 s that be is promised" in found.message
    own = Promises.of([SLO(e2e=600.0 if row % 50 == 0 else 6.0) for row in range(len(timeline))])
    assert "the 600 s that one request in a hundred is promised" in judge(timeline, (), own).message
    one = Promises.of([SLO(e2e=1e9 if row == 7 else 6.0) for row in range(len(timeline))])
    assert judge(timeline, (), one).verdict == "stationary"
    assert judge(one_server(0.7, 50, 1)).message == "50 requests are too few to tell; 100 are needed"


def test_backlog_counts_who_is_there() -> None:
    timeline = timeline_of_streams(
        np.array([0.0, 1.0, 2.0]),
        np.array([5, 7, 9], np.int32),
        [np.array([3.0]), np.array([1.5]), np.zeros(0)],
    )
    times = np.array([0.0, 1.0, 1.5, 2.5, 99.0])
    assert backlog(timeline, times).tolist() == [1, 2, 1, 2, 1]
    assert backlog(timeline, times, np.array([5.0, 7.0, 9.0])).tolist() == [5, 12, 5, 14, 9]


def test_what_a_bound_holds_back_is_backlog() -> None:
    """A request is due every second and sent when the one before it has ended: none waits in the engine, at any rate."""
    sent = 2.0 * np.arange(400)
    timeline = timeline_of_streams(sent, np.full(400, 10, np.int32), [np.array([at + 2.0]) for at in sent.tolist()])
    assert judge(timeline).verdict == "stationary"
    found = judge(timeline, due=np.arange(400.0))
    assert found.verdict == "growing"
    assert found.drift == pytest.approx(0.5, abs=0.05)
    assert judge(timeline, due=sent).verdict == "stationary"
    assert judge(timeline, due=np.zeros(400)).verdict == "stationary", "all at once: there is no rate to keep up with"


def found(verdict: str, drift: float, message: str = "") -> dict[str, Any]:
    return {"verdict": verdict, "message": message, "drift": drift, "score": 0.0}


def test_one_run_in_twelve_that_looks_as_if_it_grew_is_chance() -> None:
    """A server at nine tenths of what it can take, and bursts: of twelve runs some look as if it fell behind."""
    seen = []
    for point in range(4):
        runs = [judge(one_server(0.9, 2000, seed, cv=3.0)).to_dict() for seed in range(12 * point, 12 * point + 12)]
        seen.append((any(one["verdict"] == "growing" for one in runs), together(runs)[0]))
    assert sum(is_alarm for is_alarm, _ in seen) >= 2, "else the test would tell nothing"
    assert [verdict for _, verdict in seen] == ["stationary"] * 4
    behind = [judge(one_server(1.1, 2000, seed, cv=3.0)).to_dict() for seed in range(12)]
    assert together(behind)[0] == "growing"


def test_runs_of_a_rate_are_judged_together() -> None:
    verdict, message = together(
        [found("short", 0.1), found("stationary", 0.04), found("growing", 0.2), found("short", 0.09)]
    )
    assert verdict == "growing"
    assert "of 4 runs the backlog grew by 11% of what arrived in the mean, standard error 3.4%" in message
    assert together([found("growing", 0.6, "a")] * 2 + [found("stationary", 0.0)])[0] == "growing", "most of them"
    verdict, message = together([found("growing", 0.5), *[found("stationary", 0.0)] * 5])
    assert (verdict, "too bursty to tell" in message) == ("short", True), "one part of a trace may be another load"
    assert together([found("stationary", 0.01), found("short", 0.0, "too short")]) == ("short", "too short")
    assert together([found("short", 0.06, "bursts"), *[found("stationary", -0.01)] * 5])[0] == "stationary"
    assert together([found("growing", 0.02, "alone")]) == ("growing", "alone")
    verdict, message = together([found("short", 0.1), found("stationary", -0.2)])
    assert verdict == "short"
    assert "of 2 runs the backlog fell by 5% of what arrived in the mean" in message


def test_two_runs_that_happen_to_be_alike_show_no_growth() -> None:
    """Neither does by itself. How much two differ says little of how much runs differ."""
    alike = [found("stationary", 0.03), found("stationary", 0.031)]
    verdict, message = together(alike)
    assert verdict == "short"
    assert "of 2 runs the backlog grew by 3% of what arrived" in message
    assert message.endswith("of so few runs that may be chance; use more seeds")
    assert together([found("growing", 0.03), found("stationary", 0.031)])[0] == "growing"
    assert together(alike * 4)[0] == "growing", "of eight it is no chance"
    alarms = 0
    for point in range(60):
        runs = [judge(bursts(0.8, seed)).to_dict() for seed in (2 * point, 2 * point + 1)]
        alarms += together(runs)[0] == "growing"
    assert alarms <= 2, "a server at eight tenths of what it can take"
