"""Pipelines in virtual time: bubbles and token times that follow from the shares of the stages alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import LinearModel, Regime
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.stages import StageClocks
from actorllm.slo.workload import make_workload

PER_STEP = LinearModel((Regime(math.inf, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),), "a second a step")
PER_ROW = LinearModel((Regime(math.inf, (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)),), "a second a decode row")


def run(model: LinearModel, num_streams: int, stages: tuple[float, ...], num_tokens: int = 400) -> SimulatedRun:
    """Streams that begin together, and whose prompts cost nothing to speak of."""
    lengths = np.full(num_streams, 8, np.int32), np.full(num_streams, num_tokens, np.int32)
    shape = EngineShape(num_blocks=60_000, max_num_seqs=256, enable_prefix_caching=False, stages=stages)
    return simulate(make_workload(np.zeros(num_streams), lengths), shape, model)


def seconds(found: SimulatedRun) -> float:
    return float(found.timeline.end.max())


def test_equal_stages_have_no_bubbles_and_give_twice_the_tokens_per_second() -> None:
    found = run(PER_ROW, 32, (0.5, 0.5))
    assert max(found.bubbles[0]) < 0.02
    assert seconds(found) == pytest.approx(seconds(run(PER_ROW, 32, ())) / 2, rel=0.02)


def test_the_longest_stage_sets_the_pace() -> None:
    """Of three quarters and one quarter: the short stage waits for two thirds of the time."""
    first, second = run(PER_ROW, 32, (0.75, 0.25)).bubbles[0]
    assert first < 0.02
    assert second == pytest.approx(2 / 3, abs=0.02)


def test_a_single_stream_is_on_one_stage_at_a_time() -> None:
    found = run(PER_STEP, 1, (0.25,) * 4)
    assert found.bubbles[0] == pytest.approx((0.75,) * 4, abs=0.02)
    assert seconds(found) == pytest.approx(seconds(run(PER_STEP, 1, ())), rel=0.01)


def test_a_step_that_costs_the_same_with_half_the_rows_gains_nothing() -> None:
    """Where a step costs by its weights alone, lanes read them once each."""
    assert seconds(run(PER_STEP, 32, (0.5, 0.5))) == pytest.approx(seconds(run(PER_STEP, 32, ())), rel=0.02)


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.6), (0.0, 1.0), ()])
def test_shares_that_are_none(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="must be the shares of two stages or more, which add up to 1"):
        StageClocks(shares)
