"""Requests that move between replicas: nothing is lost, and the least free replica gets room."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import LinearModel, Regime
from actorllm.slo.failures import FailureRates
from actorllm.slo.rescheduling import Rescheduling
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.timeline import FINISHED
from actorllm.slo.workload import Workload, make_workload, poisson_arrivals

MODEL = LinearModel((Regime(math.inf, (0.01, 0.0001, 0.0005, 0.0, 0.0, 0.0)),), "10 ms and more")
SHAPE = EngineShape(num_blocks=300, max_num_seqs=32, max_model_len=4096, enable_prefix_caching=False)


def workload(rate: float = 6.0) -> Workload:
    """Few long requests among many short ones: by turns, some replicas get more of them than others."""
    rng = np.random.default_rng(4)
    is_long = rng.random(240) < 0.15
    prompt = np.where(is_long, rng.integers(1200, 2000, 240), rng.integers(20, 100, 240)).astype(np.int32)
    output = np.where(is_long, rng.integers(200, 500, 240), rng.integers(10, 60, 240)).astype(np.int32)
    return make_workload(poisson_arrivals(240, rate, 1), (prompt, output))


def run(made: Workload, rescheduling: Rescheduling | None, **more: Any) -> SimulatedRun:
    return simulate(made, SHAPE, MODEL, num_replicas=4, rescheduling=rescheduling, **more)


@pytest.mark.parametrize("moves_running", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
def test_nothing_is_lost(moves_running: bool, policy: str) -> None:
    made = workload()
    found = run(made, Rescheduling(moves_running=moves_running), policy=policy)
    timeline = found.timeline
    assert (timeline.outcome == FINISHED).all()
    np.testing.assert_array_equal(timeline.num_output, made.num_output)
    for row in range(len(timeline)):
        times = timeline.token_times(row)
        assert times.size == made.num_output[row]
        assert (np.diff(times) > 0).all()
        assert timeline.arrival[row] <= timeline.scheduled[row] < times[0]
    assert found.moves
    assert all(move.source != move.target for move in found.moves)
    assert any(move.num_tokens for move in found.moves) == moves_running
    last = {move.number: move.target for move in found.moves}
    assert all(timeline.replica[number] == target for number, target in last.items())


def test_the_tail_of_the_wait_is_shorter() -> None:
    """A request waits behind long ones although another replica has room, until it moves there."""
    made = workload()
    tails = [float(np.quantile(run(made, rules).timeline.ttft, 0.99)) for rules in (None, Rescheduling())]
    assert tails[1] < 0.7 * tails[0]


def test_clients_that_wait_for_answers_and_clients_that_give_up() -> None:
    found = run(workload(), Rescheduling(), max_concurrency=40)
    assert (found.timeline.outcome == FINISHED).all()
    assert found.moves


def test_where_all_are_free_nothing_moves_and_nothing_changes() -> None:
    made = workload(rate=0.5)
    moved, still = run(made, Rescheduling()), run(made, None)
    assert not moved.moves
    np.testing.assert_array_equal(moved.timeline.last_token, still.timeline.last_token)


def test_wrong_rules() -> None:
    for wrong in ({"period_s": 0}, {"low": 9.0, "high": 1.0}, {"most": 0}):
        with pytest.raises(ConfigError, match="rescheduling: "):
            Rescheduling(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not simulated together"):
        run(workload(), Rescheduling(), failures=FailureRates(10.0))
