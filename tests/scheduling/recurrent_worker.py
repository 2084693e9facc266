"""`RecurrentWorker`: a `ScriptedWorker` that keeps a state of each row as well, and goes on from what it was told to keep.

The state of a row is the chain of its tokens, as the KV entry of the last of them. A row that goes on from another state raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actorllm.messages import StepPlan, StepResult
from tests.scheduling.chained_tokens import Row, ScriptedWorker


@dataclass
class RecurrentWorker(ScriptedWorker):
    num_places: int = 1
    states: dict[Row, int] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    saved: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, tokens, place) of every state that was kept."""
    restored: list[tuple[int, int]] = field(default_factory=list)
    """(step, place) of every row that began with one."""
    _saves: dict[tuple[Row, int], int] = field(default_factory=dict)
    """Of the step that runs."""

    def run(self, plan: StepPlan, late: object = None) -> StepResult:
        result = super().run(plan, late)  # type: ignore[arg-type]
        assert not self._saves, f"step {plan.step} was to keep states that it does not compute"
        return result

    def _apply(self, plan: StepPlan) -> None:
        super()._apply(plan)
        self.states = {row: state for row, state in self.states.items() if row in self.rows.values()}
        restored = dict(plan.restored_states.reshape(-1, 2).tolist())
        for slot in plan.new["slot"].tolist():
            row = self.rows[slot]
            assert (slot in restored) == (row.computed > 0), f"slot {slot} begins at {row.computed}"
            if row.computed:
                place = restored.pop(slot)
                self.states[row] = self.places[place]
                self.restored.append((plan.step, place))
        assert not restored, f"slots {restored} are not new"
        for slot, position, place in plan.saved_states.reshape(-1, 3).tolist():
            assert 0 <= place < self.num_places
            self._saves[self.rows[slot], position] = place
            self.saved.append((plan.step, position, place))

    def _compute(self, row: Row, count: int, forks: Sequence[Row] = ()) -> None:
        for _ in range(count):
            if row.computed:
                assert self.states[row] == self._entry(row, row.computed - 1), "a row goes on from the state of another"
            super()._compute(row, 1, forks)
            self.states[row] = self._entry(row, row.computed - 1)
            place = self._saves.pop((row, row.computed), None)
            if place is not None:
                self.places[place] = self.states[row]

    def _sample(self, slot: int, row: Row, shared: int | None = None, num_right: int = 0) -> list[int]:
        if shared is not None:  # a fork begins with the state of its leader
            self.states[row] = shared
        return super()._sample(slot, row, shared, num_right)
