"""A fleet in virtual time whose size follows the demand: starts take time, stops wait for streams, promises are kept for less."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.scheduling.autoscaler import Autoscaler, ScalingPolicy
from actorllm.scheduling.cost_model import LinearModel, Regime
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.workload import Workload, assign_classes, fixed_lengths, make_workload, parse_mix

MODEL = LinearModel((Regime(math.inf, (0.01, 0.0001, 0.002, 0.0, 0.0, 0.0)),), "20 rows in 50 ms")
SHAPE = EngineShape(num_blocks=4096, max_num_seqs=64, enable_prefix_caching=False)
POLICY = ScalingPolicy(window_s=30.0, shrink_pause_s=5.0)
START_S = 5.0


def bursts(seed: int = 1) -> Workload:
    """Two requests a second, and twelve from second 60 to second 110."""
    rng = np.random.default_rng(seed)
    rate = np.full(400, 2.0)
    rate[60:110] = 12.0
    counts = rng.poisson(rate)
    arrival = np.sort(np.concatenate([second + rng.random(number) for second, number in enumerate(counts)]))
    made = make_workload(arrival, fixed_lengths(arrival.size, 100, 40))
    return assign_classes(made, parse_mix("all:1:ttft=1,tpot=0.05"))


def scaled(workload: Workload, most: int = 6, **more: object) -> SimulatedRun:
    scaler = Autoscaler(1, most, policy=POLICY)
    return simulate(workload, SHAPE, MODEL, router="seconds", autoscaler=scaler, start_s=START_S, **more)  # type: ignore[arg-type]


def attained(run: SimulatedRun) -> float:
    summary = run.evaluate().summary
    return float(summary["request_goodput"] / summary["request_throughput"])


def test_it_keeps_the_promises_of_a_larger_fleet_in_fewer_replica_seconds() -> None:
    workload = bursts()
    run = scaled(workload)
    small, large = (simulate(workload, SHAPE, MODEL, router="seconds", num_replicas=size) for size in (1, 2))
    assert attained(run) - attained(small) > 0.8 * (attained(large) - attained(small)) > 0.1
    assert run.replica_seconds < 0.75 * large.replica_seconds
    sizes = [size for _, size in run.sizes]
    assert sizes[0] == sizes[-1] == 1 < max(sizes)
    assert run.timeline.num_output.sum() == 40 * len(workload)


def test_a_replica_gets_requests_only_while_it_is_there() -> None:
    run = scaled(bursts())
    arrival, replica = run.timeline.arrival, run.timeline.replica
    is_there = np.zeros(arrival.size, np.bool_)
    ready = {0: 0.0}
    changes = [*run.sizes[1:], (math.inf, 0)]
    before = 0.0
    for at, size in changes:
        within = (arrival >= before) & (arrival < at)
        for number, since in ready.items():
            is_there |= within & (replica == number) & (arrival >= since)
        ready = {number: ready.get(number, at + START_S) for number in range(size)}
        before = at
    assert is_there.all()
    assert set(replica.tolist()) >= {0, 1}


def test_the_same_arguments_give_the_same_run() -> None:
    first, second = scaled(bursts()), scaled(bursts())
    assert first.sizes == second.sizes
    assert np.array_equal(first.timeline.last_token, second.timeline.last_token)


def test_clients_that_wait_for_answers_are_served_by_a_fleet_that_grows() -> None:
    """Of 40 at a time; then nothing comes any more, and the run ends."""
    made = make_workload(np.zeros(600), fixed_lengths(600, 100, 40))
    run = scaled(assign_classes(made, parse_mix("all:1:ttft=1,tpot=0.05")), max_concurrency=40)
    assert max(size for _, size in run.sizes) >= 2
    assert run.timeline.num_output.sum() == 600 * 40


def test_one_replica_at_most_is_as_without() -> None:
    workload = bursts()
    alone = simulate(workload, SHAPE, MODEL)
    assert np.array_equal(scaled(workload, 1).timeline.last_token, alone.timeline.last_token)


def test_a_size_and_an_autoscaler_are_not_given_together() -> None:
    with pytest.raises(ConfigError, match="num_replicas=2 and an autoscaler both say how many"):
        simulate(bursts(), SHAPE, MODEL, num_replicas=2, autoscaler=Autoscaler(1, 2))
