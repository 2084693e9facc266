"""`RowLanes`: which decode rows run together where several steps are in flight on the stages of a pipeline.

A decode row needs the token that its last step samples, so it is in one step in flight at most. The rows are therefore shared out
among *lanes*. A step has the decode rows of one lane, of which no other step is in flight. With as many lanes as stages
every stage has a step to compute. A prompt belongs to no lane, because its chunks need no sampled token: its next chunk may
follow at once. When it ends, its row joins the lane of that step.

*Rebalance.* RowLanes should take the same time, or the longest of them leaves the other stages idle. Before a lane is planned, rows
of it move to the lane that takes least, while that makes the two more alike. Only rows that decode move, and none is in flight
then. What a row takes is learned from the steps (`StepTime`): its products, and its context.

*Fairness.* Of the lanes that are free, those with rows come first, and of these the one that has waited longest. So each lane
with rows has a step in every round. Pure. Owned by Scheduler, where there are several lanes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64, I32
from actorllm.scheduling.batch import Batch, Rows
from actorllm.scheduling.ledger import Ledger, StepRecord
from actorllm.scheduling.step_time import StepTime
from actorllm.scheduling.telemetry.statistics import LaneStatistics

CONTEXT_OF_A_ROW = 1024.0
"""Tokens of context that take as long as a row's products, before anything has been learned."""

TOLERANCE = 0.05
"""RowLanes that differ by less than this share of the longer one are left alone: what was learned is no more exact."""

MAX_LANES = 64


class RowLanes:
    """Of the decode rows of a batch."""

    def __init__(self, number: int, batch: Batch, ledger: Ledger) -> None:
        if not 2 <= number <= MAX_LANES:
            raise ValueError(f"{number} lanes; there are 2 to {MAX_LANES}")
        self.number = number
        self.current = 0
        """The one that is being planned."""
        self.num_moves = 0
        """Rows that changed lanes."""
        self._batch = batch
        self._ledger = ledger
        self._of_slot: NDArray[np.int8] = np.zeros(batch.num_slots, np.int8)
        self._has_moved: NDArray[np.bool_] = np.zeros(batch.num_slots, np.bool_)
        """By slot: it was moved, and has been in no step since."""
        self._rows: list[Rows] = [batch.rows()] * number  # there are none yet
        self._made_of: list[Rows | None] = [None] * number
        """The rows of the batch that each entry of `_rows` was taken from."""
        self._last_step = [0] * number
        self._step_time = StepTime()

    def candidates(self) -> Iterator[int]:
        """The lanes that a step may be planned for, one after the other; each is `current` when it is given.

        Of the lanes without rows only one is: in all of them a step would have the same prompts.
        """
        busy = {record.lane for record in self._ledger}
        counts = np.bincount(self._of_slot[self._batch.rows().index], minlength=self.number).tolist()
        free = [lane for lane in range(self.number) if lane not in busy]
        free.sort(key=lambda lane: (counts[lane] == 0, self._last_step[lane]))
        for lane in free:
            self.current = lane
            if counts[lane]:
                self._rebalance()
            yield lane
            if not counts[lane]:
                return

    def rows(self) -> Rows:
        """The decode rows of the current lane: the same object as last time while none joined or left it."""
        everything, lane = self._batch.rows(), self.current
        if self._made_of[lane] is not everything:
            self._made_of[lane] = everything
            old, found = self._rows[lane], self._batch.select(everything.index[self._of_slot[everything.index] == lane])
            found.hold()  # they are compared with those of later steps
            is_same = np.array_equal(old.index, found.index) and np.array_equal(old.generations, found.generations)
            if not is_same:
                self._rows[lane] = found
        return self._rows[lane]

    def join(self, slots: list[int]) -> None:
        """These begin to decode: they are in the lane of the step that is being planned."""
        if slots:
            self._of_slot[slots] = self.current

    def launched(self, record: StepRecord) -> None:
        """A step of the current lane."""
        self._last_step[self.current] = record.step
        self._has_moved[record.rows.index] = False

    def header(self) -> I32:
        """What the plan says of its lane: its number, and the step up to which all tokens are known here."""
        return np.array((self.current, self._ledger.last_done), np.int32)

    def observe(self, record: StepRecord, seconds: float) -> None:
        """A step took so long."""
        context = int(self._batch.num_computed[record.rows.index[: record.num_decode]].sum())
        self._step_time.observe(record.num_tokens - record.num_decode, record.num_decode, context, seconds)

    def _seconds(self, rows: Rows) -> F64:
        """What each row adds to a step, up to a factor."""
        context = self._batch.num_computed[rows.index].astype(np.float64)
        per_row, per_token = self._step_time.weights[2:]
        if self._step_time.num_steps < StepTime.MIN_STEPS or per_row <= 0 or per_token < 0:
            per_row, per_token = 1.0, 1.0 / CONTEXT_OF_A_ROW
        seconds: F64 = per_row + per_token * context
        return seconds

    def _rebalance(self) -> None:
        """Move rows of the current lane to shorter ones. No step of it is in flight, so that none of its rows is."""
        everything, here = self._batch.rows(), self.current
        lanes, seconds = self._of_slot[everything.index], self._seconds(everything)
        loads = np.bincount(lanes, seconds, self.number)
        # A row that was moved has its turn first: else it might be moved for ever, each time before its turn.
        moving = np.flatnonzero((lanes == here) & ~self._has_moved[everything.index])
        for row in moving[np.argsort(-seconds[moving], kind="stable")].tolist():
            there, took = int(loads.argmin()), float(seconds[row])
            ahead = float(loads[here] - loads[there])
            if ahead <= TOLERANCE * loads[here]:
                return
            if took < ahead:  # the two are more alike afterwards
                self._of_slot[everything.index[row]] = there
                self._has_moved[everything.index[row]] = True
                loads[here] -= took
                loads[there] += took
                self.num_moves += 1
                self._made_of = [None] * self.number

    def statistics(self) -> LaneStatistics:
        """Those of now."""
        counts = np.bincount(self._of_slot[self._batch.rows().index], minlength=self.number)
        return LaneStatistics(counts.tolist(), self.num_moves)

    def check_integrity(self) -> None:
        """AssertionError when two steps in flight are of one lane, or name one row."""
        lanes = [record.lane for record in self._ledger]
        assert len(set(lanes)) == len(lanes), f"steps in flight of the lanes {lanes}"
        named = [
            pair for r in self._ledger for pair in zip(r.rows.slots.tolist(), r.rows.generations.tolist(), strict=True)
        ]
        assert len(set(named)) == len(named), "a row is in two steps in flight"
