"""Failures in virtual time: requests lose nothing but time, and go where the engine would send them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import LinearModel, Regime
from actorllm.scheduling.scheduler import Scheduler
from actorllm.slo.failures import FailureEvent, FailureRates, parse_failures
from actorllm.slo.sessions import conversations
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.timeline import ABORTED, FINISHED
from actorllm.slo.workload import Workload, assign_classes, fixed_lengths, make_workload, parse_mix, poisson_arrivals

MODEL = LinearModel((Regime(math.inf, (0.01, 0.0001, 0.0005, 0.0, 0.0, 0.0)),), "10 ms and more")
SHAPE = EngineShape(num_blocks=4096, max_num_seqs=32, enable_prefix_caching=False)


def workload(num: int = 200, rate: float = 8.0, mix: str = "all:1:ttft=1,tpot=0.05") -> Workload:
    made = make_workload(poisson_arrivals(num, rate, 1), fixed_lengths(num, 120, 40))
    return assign_classes(made, parse_mix(mix))


def check_whole(run: SimulatedRun, num_output: int = 40) -> None:
    """Every request has all of its tokens, in the order of time."""
    timeline = run.timeline
    assert (timeline.outcome == FINISHED).all()
    assert (timeline.num_output == num_output).all()
    for row in range(len(timeline)):
        times = timeline.token_times(row)
        assert times.size == num_output
        assert (np.diff(times) > 0).all()
        assert timeline.arrival[row] <= timeline.scheduled[row] < times[0] == timeline.first_token[row]
        assert timeline.last_token[row] == times[-1] <= timeline.end[row] + 1e-9


@pytest.mark.parametrize("kind", ["workers", "scheduler", "replica"])
@pytest.mark.parametrize("policy", ["fcfs", "vtc", "cohost"])
def test_requests_go_on_where_they_were(kind: Any, policy: str) -> None:
    made = workload()
    run = simulate(made, SHAPE, MODEL, policy=policy, failures=[FailureEvent(10.0, kind, down_s=3.0)])
    check_whole(run)
    (note,) = run.failures
    assert (note.at, note.back_at, note.kind, note.num_moved) == (10.0, 13.0, kind, 0)
    assert note.num_requests > 0
    times = np.concatenate(run.timeline.step_ends)
    assert not ((times > 10.0) & (times < 13.0)).any(), "nothing is computed meanwhile"
    before = simulate(made, SHAPE, MODEL, policy=policy)
    early = before.timeline.end < 9.9
    np.testing.assert_array_equal(run.timeline.end[early], before.timeline.end[early])
    assert run.timeline.e2e.mean() > before.timeline.e2e.mean()
    assert any("1 failures met" in warning for warning in run.warnings)


@pytest.mark.parametrize("router", ["round-robin", "seconds"])
def test_requests_of_a_lost_replica_move(router: str) -> None:
    run = simulate(
        workload(rate=16.0),
        SHAPE,
        MODEL,
        num_replicas=2,
        router=router,
        failures=[FailureEvent(5.0, "replica", 1, 4.0)],
    )
    check_whole(run)
    (note,) = run.failures
    assert note.num_moved == note.num_requests > 0
    arrived = (run.timeline.arrival >= 5.0) & (run.timeline.arrival < 9.0)
    assert (run.timeline.replica[arrived] == 0).all(), "none is sent where nothing is"
    assert (run.timeline.replica[run.timeline.arrival > 9.0] == 1).any(), "it takes requests again"


@pytest.mark.parametrize("kind", ["workers", "scheduler", "replica"])
def test_clients_that_wait_for_answers(kind: Any) -> None:
    made = workload(num=120)
    failures = [FailureEvent(2.0, kind, down_s=2.0), FailureEvent(8.0, kind, down_s=0.5), FailureEvent(8.2, kind)]
    run = simulate(made, SHAPE, MODEL, max_concurrency=6, failures=failures)
    check_whole(run)
    assert [note.at for note in run.failures] == [2.0, 8.0], "what is down does not fail"


def test_a_client_that_gives_up_meanwhile() -> None:
    run = simulate(
        workload(mix="all:1:patience=2"), SHAPE, MODEL, failures=[FailureEvent(10.0, "scheduler", down_s=30.0)]
    )
    is_held = (run.timeline.arrival > 10.0) & (run.timeline.arrival < 38.0)
    assert is_held.any()
    assert (run.timeline.outcome[is_held] == ABORTED).all()


def test_a_prefix_cache_is_lost() -> None:
    made = conversations(60, 1.0, seed=3)
    shape = EngineShape(num_blocks=8192, max_num_seqs=32)
    whole = simulate(made, shape, MODEL)
    run = simulate(made, shape, MODEL, failures=[FailureEvent(60.0, "workers", down_s=1.0)])
    assert 0 < run.timeline.num_cached.sum() < whole.timeline.num_cached.sum()


def test_an_engine_that_is_down_for_a_share_of_the_time_does_that_much_less() -> None:
    """Long requests, all there from the start: what a failure costs besides is to compute their KV again."""
    made = make_workload(np.zeros(32), fixed_lengths(32, 16, 1500))
    model = LinearModel((Regime(math.inf, (0.0, 0.0, 0.0006, 0.0, 0.0, 0.0)),), "by the row")
    shape = EngineShape(num_blocks=20_000, max_num_seqs=16, max_num_batched_tokens=8192, enable_prefix_caching=False)
    rates = FailureRates(6.0, "workers", 2.0)
    run = simulate(made, shape, model, failures=rates, seed=4)
    check_whole(run, 1500)
    alone = simulate(made, shape, model).timeline.duration
    down = sum(note.back_at - note.at for note in run.failures)
    assert run.timeline.duration == pytest.approx(alone + down, rel=0.02)
    assert len(run.failures) == pytest.approx(alone / 6.0, rel=0.6)
    again = simulate(made, shape, model, failures=rates, seed=4)
    assert again.failures == run.failures
    np.testing.assert_array_equal(again.timeline.end, run.timeline.end)
    assert simulate(made, shape, model, failures=rates, seed=5).failures != run.failures


def test_the_schedulers_are_those_of_the_engine() -> None:
    """After a failure the block tables are whole, and nothing is left behind."""
    kept: list[Scheduler] = []

    def make(number: int, policy: Any) -> Scheduler:
        kept.append(SHAPE.scheduler(policy))
        return kept[-1]

    failures = [FailureEvent(4.0, "workers"), FailureEvent(12.0, "scheduler"), FailureEvent(20.0, "replica")]
    check_whole(simulate(workload(), SHAPE, MODEL, failures=failures, make_scheduler=make))
    assert len(kept) == 3
    kept[-1].check_integrity()
    assert kept[0].statistics().num_worker_losses == 1
    assert kept[-1].statistics().kv.usage == 0


def test_what_is_read(tmp_path: Path) -> None:
    assert parse_failures("replica:600:5") == FailureRates(600.0, "replica", 5.0)
    file = tmp_path / "failures.json"
    file.write_text(json.dumps([{"at": 3, "kind": "scheduler", "down_s": 2}]))
    assert parse_failures(str(file)) == [FailureEvent(3, "scheduler", 0, 2)]
    for given, said in (
        ([{"at": 1, "kind": "disk"}], "kind='disk' must be one of workers, scheduler, replica"),
        ([{"at": -1}], "at=-1 must be a number of seconds, 0 or more"),
        ([{"kind": "workers"}], "needs 'at'"),
        ([{"at": 1, "donw_s": 1}], "did you mean 'down_s'"),
        ([{"at": 1, "down_s": 0}], "down_s=0 must be a number of seconds, more than 0"),
        ({}, "must be a list of objects"),
    ):
        file.write_text(json.dumps(given))
        with pytest.raises(ConfigError, match=said):
            parse_failures(str(file))
    for text in ("workers:x:1", "no-such-file", "disk:1:1", "workers:0:1"):
        with pytest.raises(ConfigError):
            parse_failures(text)
    with pytest.raises(ConfigError, match="replica=1 is not there"):
        simulate(workload(2), SHAPE, MODEL, failures=[FailureEvent(1.0, replica=1)])
