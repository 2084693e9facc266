"""The simulator against queues whose means are known: Little, M/D/1, Pollaczek-Khinchine, priorities (Cobham), SRPT.

One slot makes an engine a queue with one server; a constant step time makes the number of steps the service.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from actorllm.messages import F64, I32
from actorllm.scheduling.cost_model import LinearModel, Regime
from actorllm.scheduling.policies.srpf import Srpf
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.slo.experiments.stationarity import backlog
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.workload import make_workload, poisson_arrivals

STEP = LinearModel((Regime(math.inf, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),), "a second a step")
CHUNK = 64


def queue(
    rate: float, num_steps: I32, *, policy: str = "fcfs", max_num_seqs: int = 1, seed: int = 1, by_prompt: bool = False
) -> SimulatedRun:
    """Requests of so many seconds each, which they decode, or (by_prompt) whose prompts are computed."""
    num = num_steps.size
    shape = EngineShape(
        num_blocks=60_000, max_num_seqs=max_num_seqs, max_num_batched_tokens=CHUNK, max_model_len=16_384, depth=1,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompt = num_steps * CHUNK if by_prompt else np.full(num, 8, np.int32)
    output = np.ones(num, np.int32) if by_prompt else num_steps
    workload = make_workload(poisson_arrivals(num, rate, seed), (prompt.astype(np.int32), output.astype(np.int32)))
    return simulate(workload, shape, STEP, policy=policy if policy != "srpt" else lambda: KeyPlanner(Srpt()))


class Srpt(Srpf):
    """With strict packing the prompt that is nearest to its end has the step for itself."""

    strict = True


def waits(run: SimulatedRun, num_steps: I32) -> F64:
    found: F64 = run.timeline.e2e - num_steps
    assert found.min() > -1e-6
    return found


def test_little() -> None:
    """The mean number of requests in the engine is their rate times their mean time there."""
    lengths = np.random.default_rng(3).geometric(0.25, 4000).astype(np.int32)
    timeline = queue(0.2, lengths).timeline
    begin, end = float(timeline.arrival[0]), float(timeline.end.max())
    times = np.linspace(begin, end, 400_001)
    mean_number = float(backlog(timeline, times[:-1]).mean())
    assert mean_number == pytest.approx(len(timeline) / (end - begin) * float(timeline.e2e.mean()), rel=1e-3)


@pytest.mark.parametrize("utilization", [0.5, 0.8])
def test_m_d_1(utilization: float) -> None:
    """Every request takes a step: its mean wait is rho / (2 (1 - rho)). Each single one is that of Lindley's recursion."""
    lengths = np.ones(12_000, np.int32)
    run = queue(utilization, lengths)
    found, arrival = waits(run, lengths), run.timeline.arrival
    expected = [0.0]
    for gap in np.diff(arrival).tolist():
        expected.append(max(0.0, expected[-1] + 1 - gap))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.mean() == pytest.approx(utilization / (2 * (1 - utilization)), rel=0.1)


@pytest.mark.parametrize("by_prompt", [False, True])
def test_pollaczek_khinchine(by_prompt: bool) -> None:
    """Of any service time: the mean wait is lambda E[S^2] / (2 (1 - rho))."""
    lengths = np.where(np.random.default_rng(5).random(12_000) < 0.8, 1, 8).astype(np.int32)
    rate = 0.7 / float(lengths.mean())
    expected = rate * float((lengths.astype(float) ** 2).mean()) / (2 * (1 - 0.7))
    assert waits(queue(rate, lengths, by_prompt=by_prompt), lengths).mean() == pytest.approx(expected, rel=0.08)


def test_shortest_first_without_preemption() -> None:
    """Two classes, the shorter first (Cobham 1954): W_k = W_0 / ((1 - sigma_{k-1}) (1 - sigma_k))."""
    lengths = np.where(np.random.default_rng(7).random(12_000) < 0.8, 1, 8).astype(np.int32)
    rate = 0.7 / float(lengths.mean())
    found = waits(queue(rate, lengths, policy="srpf", by_prompt=True), lengths)
    residual = rate * float((lengths.astype(float) ** 2).mean()) / 2
    of_short = rate * float((lengths == 1).mean())
    assert found[lengths == 1].mean() == pytest.approx(residual / (1 - of_short), rel=0.08)
    assert found[lengths == 8].mean() == pytest.approx(residual / ((1 - of_short) * (1 - 0.7)), rel=0.12)


def test_shortest_remaining_processing_time() -> None:
    """Schrage and Miller 1966, for sizes that are so many steps that a step is little."""
    low, high, num, utilization = 4, 24, 3000, 0.8
    lengths = np.random.default_rng(9).integers(low, high + 1, num).astype(np.int32)
    rate = utilization / float(lengths.mean())
    took = queue(rate, lengths, policy="srpt", max_num_seqs=256, by_prompt=True).timeline.e2e
    sizes = np.linspace(0.0, high + 0.5, 5001)
    width = sizes[1] - sizes[0]
    density = np.where((sizes >= low - 0.5) & (sizes <= high + 0.5), 1 / (high - low + 1), 0.0)
    load = rate * np.cumsum(density * sizes) * width
    below = np.cumsum(density) * width
    square = rate * (np.cumsum(density * sizes**2) * width + sizes**2 * (1 - below))
    expected = square / (2 * (1 - load) ** 2) + np.cumsum(1 / (1 - load)) * width
    mean = float((expected * density).sum() * width)
    of_pollaczek = rate * float((lengths.astype(float) ** 2).mean()) / (2 * (1 - utilization)) + float(lengths.mean())
    assert mean < 0.8 * of_pollaczek, "else the test would tell nothing"
    assert took.mean() == pytest.approx(mean, rel=0.1)
