"""Step times fitted to few steps, and errors by kind of step."""

from __future__ import annotations

import numpy as np
import pytest

from actorllm.scheduling.cost_model import MeasuredSteps
from actorllm.slo.step_fit import errors_by_size, fit_recording


def steps(prompts: dict[int, tuple[int, float]], num: int = 320, seed: int = 0, noise: float = 0.02) -> MeasuredSteps:
    """Decode steps of 4 rows, 10 ms each, but for steps with prompts: their tokens and seconds by number."""
    rng = np.random.default_rng(seed)
    p, d = np.zeros(num), 4.0 + np.arange(num) % 3
    took = (0.008 + 0.0005 * d) * rng.normal(1, noise, num)
    for number, (tokens, seconds) in prompts.items():
        p[number], took[number] = tokens, seconds
    end = np.cumsum(took)
    return MeasuredSteps(p, d, d * 100, np.zeros(num), p * (p + 1) / 2, np.zeros(num), end - took, end)


def test_a_cold_first_step_does_not_make_prompts_dear() -> None:
    """Two steps with prompts at a millisecond a token, and a first one of 20 tokens that took 149 ms. Whichever of them a
    hold-out of every fifth step would take away, the answer is the same."""
    for first in (4, 5, 6):
        found = fit_recording(steps({0: (20, 0.149), first: (800, 0.81), first + 300: (600, 0.61)}))
        assert found is not None
        assert found.num_cold == 2
        assert found.num_steps == {"decode": 316, "prompt": 2}
        assert found.model.seconds(200, 0, 0, 0, 200 * 201 / 2) == pytest.approx(0.21, rel=0.15)
        assert found.is_sure_of("prompt")
        assert found.is_sure_of("decode")
        assert "without the 2 first of their kind; mean error" in found.told()[0]


def test_of_a_long_recording_some_steps_are_judged() -> None:
    """All are fitted to; their kind that is rare is judged whole."""
    found = fit_recording(steps({number: (100 + number, 0.1 + number / 1e3) for number in range(9, 8000, 800)}, 8000))
    assert found is not None
    assert found.num_steps == {"decode": 7989, "prompt": 9}
    assert found.errors["decode"] < 0.03
    assert found.errors["prompt"] < 0.1


def test_steps_that_contradict_each_other_are_not_believed() -> None:
    found = fit_recording(steps({0: (20, 0.03), 40: (100, 0.9), 80: (800, 0.1), 120: (400, 0.02), 200: (100, 0.05)}))
    assert found is not None
    assert found.errors["prompt"] > 0.25
    assert not found.is_sure_of("prompt")
    assert found.is_sure_of("decode")


def test_too_few_steps_have_no_model() -> None:
    assert fit_recording(steps({3: (20, 0.03)}, num=101)) is None
    assert fit_recording(steps({}, num=0)) is None


def test_errors_are_told_by_kind_and_size() -> None:
    """A mean would be hardly above 1 %: the large batches are few."""
    log = steps({}, num=1000)
    features = log.features()
    features[990:, 2] = 100
    measured = np.full(1000, 0.01)
    predicted = np.where(np.arange(1000) < 990, 0.01, 0.013)
    found = {one.label: one for one in errors_by_size(features, measured, predicted)}
    assert found["decode, 100 rows"].error == pytest.approx(0.3)
    assert found["decode, 100 rows"].bias == pytest.approx(0.3)
    assert found["decode, 4 rows"].error == 0
    assert found["decode, 5 to 6 rows"].num_steps == 660
