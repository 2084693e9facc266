"""`Ledger`: the steps in flight. Every launched step is recorded until its result is applied or it is voided.

Invariants: steps have increasing ids and complete in launch order; a result for any other step is not applied. What a
row of a step meant (slot, generation, sequence) is taken from the record, never from the present state of the slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from actorllm.messages import I32, NO_I32
from actorllm.scheduling.batch import Rows
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.snapshots import Save


class StepRecord(NamedTuple):
    """One launched step."""

    step: int
    rows: Rows
    """The rows that sample, in the order of the plan: decode rows, then completed prefills, then forks of these."""
    num_decode: int
    prefills: tuple[tuple[Sequence, int], ...]
    """Every prefill chunk of the step with its number of tokens, sampling or not; then forks with those they take over."""
    num_tokens: int
    launched: float
    zeroed: I32 = NO_I32
    """The blocks that its plan has cleared first."""
    freed: I32 = NO_I32
    """The slots that its plan has freed."""
    max_drafts: int = 0
    """How many drafts each decode row may have; num_tokens is without them."""
    lane: int = 0
    """That its decode rows are of (`scheduling.lanes`)."""
    saves: tuple[Save, ...] = ()
    """The states of recurrent layers that it keeps behind prefixes."""

    @property
    def named(self) -> list[Sequence]:
        """The sequences in the step, those that sample first; one that samples and prefills stands twice."""
        return [*self.rows.sequences, *(sequence for sequence, _ in self.prefills)]


class Ledger:
    """Steps in flight, oldest first, at most `depth` of them."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.has_room = True
        """Another step may be launched."""
        self.in_flight: deque[StepRecord] = deque()
        """Their records. Only the methods here change it."""
        self.next_step = 1
        """The one that is launched next: the attribute is read several times a step."""

    def __len__(self) -> int:
        return len(self.in_flight)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.in_flight)

    @property
    def last_step(self) -> int:
        """The one that was launched last; 0: none was."""
        return self.next_step - 1

    @property
    def last_done(self) -> int:
        """Every step up to this one is done or void."""
        return self.in_flight[0].step - 1 if self.in_flight else self.last_step

    @property
    def newest(self) -> StepRecord:
        """The step that was launched last; IndexError when none is in flight."""
        return self.in_flight[-1]

    def launch(self, record: StepRecord) -> None:
        if record.step != self.next_step or not self.has_room:
            raise ValueError(f"step {record.step} cannot be launched now ({len(self)} in flight)")
        self.next_step = record.step + 1
        self.in_flight.append(record)
        self.has_room = len(self.in_flight) < self.depth

    def oldest(self, step: int) -> StepRecord | None:
        """The record of the oldest step in flight if it is this one; else None."""
        return self.in_flight[0] if self.in_flight and self.in_flight[0].step == step else None

    def find(self, step: int) -> StepRecord | None:
        """The record of a step in flight; None if it is not."""
        return next((record for record in self.in_flight if record.step == step), None)

    def complete(self, record: StepRecord) -> None:
        """The oldest step is done, and no longer in flight."""
        assert record is self.in_flight[0]
        self.in_flight.popleft()
        self.has_room = True

    def void(self, step: int) -> list[StepRecord]:
        """This step failed: it and all later ones are void. They are returned and their results will not be applied."""
        if not self.in_flight or not self.in_flight[0].step <= step <= self.in_flight[-1].step:
            return []
        voided: list[StepRecord] = []
        while self.in_flight and self.in_flight[-1].step >= step:
            voided.append(self.in_flight.pop())
        self.has_room = True
        return voided[::-1]

    def skip(self, steps: int) -> None:
        """Count steps that were run without being recorded (`Scheduler.advance`): those in flight are later ones now."""
        self.next_step += steps
        self.in_flight = deque(record._replace(step=record.step + steps) for record in self.in_flight)

    def last_step_naming(self, sequence: Sequence) -> int:
        """The last step in flight that names this sequence; 0 if none does."""
        for record in reversed(self.in_flight):
            if any(s is sequence for s, _ in record.prefills) or any(s is sequence for s in record.rows.sequences):
                return record.step
        return 0
