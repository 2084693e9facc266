"""`StepSeconds`: what the steps took that a request was in, for its metrics. Pure.

A request with a slot is taken to be in every step, so nothing is counted by request and step. The sums over all steps
are noted when the first step of a request is the next one, and compared when the slot is left. Owned by Scheduler; called by it,
by RequestTable, and by the scheduler actor, which has the clock.

Sums are tuples of seconds, not objects: each request that comes or goes pays for them.

    planning    of the scheduler: plans, and what results bring
    forward     of the worker: from the beginning of a step to its end, sampling included
    execution   from the launch of a step, or the result of the one before it, to its result
"""

from __future__ import annotations

from collections import deque

from actorllm.scheduling.ledger import Ledger, StepRecord
from actorllm.scheduling.sequence import Sequence


class StepSeconds:
    """The sums, and the requests that join them next."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.planning = 0.0
        """In all; the scheduler actor, which has the clock, adds to it."""
        self._forward = self._execution = 0.0
        self._last_done = 0.0
        """When the last result was applied."""
        self._joining: deque[tuple[int, Sequence]] = deque()
        """Those whose first step waits for a step before it, with the last step before that first one."""

    def done(self, record: StepRecord, forward: float, now: float) -> None:
        """A step is done."""
        self._forward += forward
        self._execution += now - max(record.launched, self._last_done)
        self._last_done = now
        joining = self._joining
        if joining and joining[0][0] <= record.step:
            sums = self.planning, self._forward, self._execution
            while joining and joining[0][0] <= record.step:
                sequence = joining.popleft()[1]
                if sequence.slot >= 0:  # else it has left already
                    sequence.seconds_before = sums

    def enter(self, sequence: Sequence) -> None:
        """It has a slot, and is in the next step that is planned."""
        if self._ledger.in_flight:
            sequence.seconds_before = None
            self._joining.append((self._ledger.last_step, sequence))
        else:
            sequence.seconds_before = self.planning, self._forward, self._execution

    def leave(self, sequence: Sequence) -> None:
        """It has its slot no longer."""
        before = sequence.seconds_before
        if before is not None:
            spent = sequence.seconds  # in a slot that it had before
            sequence.seconds = (
                spent[0] + (self.planning - before[0]),
                spent[1] + (self._forward - before[1]),
                spent[2] + (self._execution - before[2]),
            )
            sequence.seconds_before = None
