"""What steps and drafts cost is measured in turns."""

from __future__ import annotations

from actorllm.model.speculation import costs


def test_a_draft_is_measured_behind_a_step_of_its_size() -> None:
    """So it has the threads that the engine computes it with: a step sets them for what comes behind it."""
    calls: list[tuple[str, int]] = []
    steps, drafts = costs.measured(
        lambda size: calls.append(("step", size)),
        lambda size: calls.append(("draft", size)),
    )
    sizes = list(costs.SIZES)
    assert [size for size, _ in steps] == [size for size, _ in drafts] == sizes
    assert [name for name, _ in calls] == ["step", "draft"] * (len(calls) // 2)
    assert [size for name, size in calls if name == "draft"] == sizes * (1 + costs.ROUNDS)
    assert all(0 <= seconds < costs.BUDGET_S for _, seconds in (*steps, *drafts))
