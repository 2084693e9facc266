"""What time and money virtual runs take besides steps: policies, ways of requests and tokens, slow periods, energy."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.messages import F64
from actorllm.scheduling.cost_model import LinearModel, MeasuredSteps, Regime, fit, from_json, residual_memory, to_json
from actorllm.slo.delays import ClientDelays
from actorllm.slo.energy import PowerModel, energy_of
from actorllm.slo.policy_cost import DeclaredCost, MeasuredCost
from actorllm.slo.residual_memory import SlowUniforms
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.workload import Workload, fixed_lengths, make_workload, poisson_arrivals

STEP = LinearModel((Regime(math.inf, (0.05, 0.0, 0.001, 0.0, 0.0, 0.0)),), "50 ms and more")
SHAPE = EngineShape(num_blocks=4096, max_num_seqs=16, enable_prefix_caching=False)


def workload(num: int = 60, rate: float = 1.0, num_output: int = 20) -> Workload:
    return make_workload(poisson_arrivals(num, rate, 2), fixed_lengths(num, 64, num_output))


# Policies ----------------------------------------------------------------------------------------------------------------


def test_a_queue_whose_policy_takes_time_is_m_d_1_of_both() -> None:
    """One slot, one step a request: the service is a step and the decision before it (Lindley's recursion)."""
    num, cost = 4000, 0.3
    step = LinearModel((Regime(math.inf, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),), "a second")
    shape = replace(SHAPE, max_num_seqs=1, depth=1)
    made = make_workload(poisson_arrivals(num, 0.5, 1), fixed_lengths(num, 8, 1))
    run = simulate(made, shape, step, policy_cost=DeclaredCost(plan_s=cost))
    waited, service = [0.0], 1.0 + cost
    for gap in np.diff(made.arrival).tolist():
        waited.append(max(0.0, waited[-1] + service - gap))
    np.testing.assert_allclose(run.timeline.e2e - service, waited, atol=1e-6)
    rho = 0.5 * service
    assert run.timeline.e2e.mean() - service == pytest.approx(service * rho / (2 * (1 - rho)), rel=0.12)
    assert run.policy_s == pytest.approx((num * cost,))


def test_a_cheap_policy_hides_behind_the_step_in_flight() -> None:
    """Two steps are in flight: what takes less than a step delays nothing once the engine is busy, and what takes more does."""
    made = make_workload(np.zeros(4), fixed_lengths(4, 16, 200))
    free = simulate(made, SHAPE, STEP).timeline.duration
    cheap = simulate(made, SHAPE, STEP, policy_cost=DeclaredCost(plan_s=0.01))
    dear = simulate(made, SHAPE, STEP, policy_cost=DeclaredCost(plan_s=0.1))
    assert cheap.timeline.duration == pytest.approx(free, rel=0.01)
    assert dear.timeline.duration == pytest.approx(200 * 0.1, rel=0.05)
    assert any("ms in the mean, 100 ms at most" in warning for warning in dear.warnings)


def test_no_cost_is_no_difference() -> None:
    made = workload()
    runs = [simulate(made, SHAPE, STEP, policy=name) for name in ("fcfs", "cohost")]
    costed = [simulate(made, SHAPE, STEP, policy=name, policy_cost=DeclaredCost()) for name in ("fcfs", "cohost")]
    for run, other in zip(runs, costed, strict=True):
        np.testing.assert_array_equal(run.timeline.last_token, other.timeline.last_token)


def test_it_is_measured_by_the_callers_clock() -> None:
    ticks = itertools.count()
    made = workload(20)
    run = simulate(made, SHAPE, STEP, policy_cost=MeasuredCost(lambda: next(ticks) * 0.001, factor=2.0))
    assert run.policy_s[0] == pytest.approx(0.002 * next(ticks) / 2, rel=1e-6)
    waiting = simulate(workload(60, 50.0), SHAPE, STEP, policy_cost=DeclaredCost(waiting_s=0.001)).policy_s[0]
    assert waiting > 0.1, "it grows with the queue"
    with pytest.raises(ConfigError, match="plan_s=-1"):
        DeclaredCost(plan_s=-1)


# Ways --------------------------------------------------------------------------------------------------------------------


def test_ways_are_drawn_and_nothing_overtakes() -> None:
    delays = ClientDelays(submit=(0.0, 0.01, 0.5), tokenize_per_token=0.001, deliver=(0.0, 0.02))
    run = simulate(workload(), SHAPE, STEP, delays=delays, seed=3)
    timeline = run.timeline
    came = timeline.scheduled - timeline.arrival
    assert came.min() >= 0.064 - 1e-9, "a prompt of 64 tokens is read"
    assert came.max() > 0.3
    assert (np.diff(timeline.scheduled) >= 0).all(), "in their order"
    for row in range(len(timeline)):
        assert (np.diff(timeline.token_times(row)) >= 0).all()
    assert (timeline.end >= timeline.last_token).all()
    again = simulate(workload(), SHAPE, STEP, delays=delays, seed=3).timeline
    np.testing.assert_array_equal(again.last_token, timeline.last_token)


def test_one_number_is_the_constant_of_the_model() -> None:
    constant = replace(STEP, submit_s=0.02, deliver_s=0.01)
    run = simulate(workload(), SHAPE, constant).timeline
    other = simulate(workload(), SHAPE, STEP, delays=ClientDelays(submit=(0.02,), deliver=(0.01,))).timeline
    np.testing.assert_allclose(other.last_token, run.last_token, atol=1e-9)
    np.testing.assert_allclose(other.end, run.end, atol=1e-9)


def test_delays_come_from_samples_and_wrong_ones_are_refused() -> None:
    rng = np.random.default_rng(0)
    made = ClientDelays.of_samples(rng.exponential(0.1, 999).tolist(), [0.01, 0.02])
    assert made.submit[20] == pytest.approx(0.1 * math.log(2), rel=0.1)
    for wrong in ({"submit": ()}, {"submit": (1.0, 0.5)}, {"deliver": (-1.0,)}, {"tokenize_per_token": math.nan}):
        with pytest.raises(ConfigError):
            ClientDelays(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="deliver must be one number"):
        simulate(workload(), SHAPE, STEP, delays=ClientDelays(deliver=(0.0, 1.0)), max_concurrency=2)


# Slow periods ------------------------------------------------------------------------------------------------------------


def lag_1(values: F64) -> float:
    return float(np.corrcoef(values[1:], values[:-1])[0, 1])


def test_neighbours_are_alike_and_the_distribution_is_the_same() -> None:
    drawn = SlowUniforms(np.random.default_rng(1), 0.8).random(40_000)
    assert residual_memory(drawn) == pytest.approx(0.8, abs=0.02)
    np.testing.assert_allclose(np.quantile(drawn, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.03)
    assert residual_memory(np.random.default_rng(1).random(4000)) == 0.0, "by chance there is none"


def test_slow_periods_make_queues_longer() -> None:
    residuals = (0.3, 0.5, 0.7, 1.0, 2.5)
    made = make_workload(poisson_arrivals(3000, 14.0, 5), fixed_lengths(3000, 16, 1))
    waits = []
    for memory in (0.0, 0.98):
        model = LinearModel(STEP.regimes, residuals=residuals, residual_memory=memory)
        run = simulate(made, replace(SHAPE, max_num_seqs=1, depth=1), model, seed=2)
        waits.append(float(run.timeline.ttft.mean()))
    assert waits[1] > 1.5 * waits[0]


def test_a_fit_finds_the_memory_of_steps() -> None:
    rng = np.random.default_rng(3)
    num = 1500
    p, d = rng.integers(0, 300, num).astype(float), rng.integers(1, 30, num).astype(float)
    factor = 0.7 + 0.6 * SlowUniforms(rng, 0.7).random(num)
    took = (0.01 + 1e-4 * p + 2e-4 * d) * factor
    ended = np.cumsum(took)
    nothing = np.zeros(num)
    log = MeasuredSteps(p, d, nothing, nothing, nothing, ended - took, ended - took, ended)
    model = fit(log).model
    assert model.residual_memory == pytest.approx(0.7, abs=0.08)
    assert from_json(to_json(model)) == model
    with pytest.raises(ConfigError, match="residual_memory=1"):
        replace(model, residual_memory=1.0)


# Energy ------------------------------------------------------------------------------------------------------------------


def metered(made: Workload, **more: Any) -> SimulatedRun:
    return simulate(made, SHAPE, STEP, metered=True, **more)


def test_energy_is_idle_time_and_busy_time() -> None:
    """A request alone: so many steps of known length; skipping steps changes nothing."""
    made = make_workload(np.array([0.0, 100.0]), fixed_lengths(2, 64, 20))
    busy = 2 * (0.05 + 19 * 0.051)
    for skip in (True, False):
        run = metered(made, skip=skip)
        assert run.busy_s == pytest.approx((busy,))
        use = energy_of(run, PowerModel(100.0, 500.0, price_per_hour=3.6, price_per_kwh=0.5))
        there = run.replica_seconds
        assert use.joules == pytest.approx(100 * there + 400 * busy)
        assert use.cost == pytest.approx(3.6 * there / 3600 + 0.5 * use.joules / 3.6e6)
        assert use.joules_per_output_token == pytest.approx(use.joules / 40)
        assert use.joules_per_request == pytest.approx(use.joules / 2)
        assert use.utilization == pytest.approx(busy / there)
    policy = metered(made, policy_cost=DeclaredCost(plan_s=0.001))
    assert policy.busy_s == pytest.approx((busy,)), "a worker that waits for its policy does not compute"


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="metered=True"):
        energy_of(simulate(workload(2), SHAPE, STEP), PowerModel(1, 2))
    assert PowerModel.parse("75:650:2.5") == PowerModel(75.0, 650.0, 2.5)
    for wrong in ("75", "a:b", "2:1", "1:2:3:4:5"):
        with pytest.raises(ConfigError):
            PowerModel.parse(wrong)


# Replicas that differ ----------------------------------------------------------------------------------------------------


def test_replicas_may_differ() -> None:
    """A router that knows what steps take sends a slow replica less."""
    slow = replace(STEP, regimes=(Regime(math.inf, (0.2, 0.001, 0.004, 0.0, 0.0, 0.0)),), name="slow")
    made = make_workload(poisson_arrivals(400, 10.0, 2), fixed_lengths(400, 256, 10))
    run = simulate(made, [SHAPE, replace(SHAPE, max_num_seqs=4)], [STEP, slow], num_replicas=2, router="seconds")
    share = float((run.timeline.replica == 0).mean())
    assert share > 0.7
    alike = simulate(made, SHAPE, STEP, num_replicas=2, router="seconds")
    assert float((alike.timeline.replica == 0).mean()) == pytest.approx(0.5, abs=0.1)
    with pytest.raises(ConfigError, match="3 models for 2 replicas"):
        simulate(made, SHAPE, [STEP] * 3, num_replicas=2)
