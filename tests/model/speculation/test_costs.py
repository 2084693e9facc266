"""What steps and drafts cost is measured in turns, and again where other programs were in the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actorllm.model.speculation import costs
from actorllm.model.speculation.costs import Sample


def test_a_draft_is_measured_behind_a_step_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it has the threads that the engine computes it with: a step sets them for what comes behind it."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(costs, "_num_switches", lambda: 0)
    monkeypatch.setattr(costs, "LONGEST_WAIT", float("inf"))
    steps, drafts = costs.measured(
        lambda size: calls.append(("step", size)),
        lambda size: calls.append(("draft", size)),
    )
    sizes = list(costs.SIZES)
    assert [size for size, _ in steps] == [size for size, _ in drafts] == sizes
    assert [name for name, _ in calls] == ["step", "draft"] * (len(calls) // 2)
    assert [size for name, size in calls if name == "draft"] == sizes * (1 + costs.ROUNDS)
    assert all(0 <= seconds < costs.BUDGET_S for _, seconds in (*steps, *drafts))


class Neighbour:
    """Another program that is in the way of the first so many samples of steps of more than one token."""

    def __init__(self, num_disturbed: int) -> None:
        self.num_left = num_disturbed
        self.sizes: list[int] = []

    def sample_of(self, compute: Callable[[int], object], size: int) -> Sample:
        self.sizes.append(size)
        if size == 1:
            return Sample(1.0, True)
        self.num_left -= 1
        return Sample(1.1, True) if self.num_left < 0 else Sample(9.0 if self.num_left % 7 else 0.9, False)


def test_what_was_disturbed_is_measured_until_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what was not is left alone. A disturbed sample counts for nothing where there is a quiet one, even a shorter one."""
    neighbour = Neighbour(6 * (costs.ROUNDS + 3))
    monkeypatch.setattr(costs, "sample_of", neighbour.sample_of)
    (steps,) = costs.measured(lambda size: None)
    assert dict(steps) == {1: 1.0} | dict.fromkeys(costs.SIZES[1:], 1.1)
    assert neighbour.sizes.count(1) == costs.ROUNDS
    assert neighbour.sizes.count(64) == costs.ROUNDS + 4
    assert not caplog.records


def test_what_stays_disturbed_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(costs, "sample_of", Neighbour(10**6).sample_of)
    (steps,) = costs.measured(lambda size: None)
    assert dict(steps) == {1: 1.0} | dict.fromkeys(costs.SIZES[1:], 0.9)
    assert "steps of 2, 4, 8, 16, 32, 64 tokens" in caplog.text
