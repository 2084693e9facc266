"""`StepSeconds`: what the steps took that a request was in, for its metrics. Pure.

A request with a slot is taken to be in every step, so nothing is counted by request and step. The sums over all steps
are noted when the first step of a request is the next one, and compared when the slot is left. Owned by Scheduler; called by it,
by RequestTable, and by the scheduler actor, which has the clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from actorllm.scheduling.ledger import Ledger, StepRecord
from actorllm.scheduling.sequence import Sequence


class SecondsOfSteps(NamedTuple):
    """Sums over steps."""

    planning: float = 0.0
    """Of the scheduler: plans, and what results bring."""
    forward: float = 0.0
    """Of the worker, from the beginning of a step to its end, sampling included."""
    execution: float = 0.0
    """From the launch of a step, or the result of the one before it, to its result."""

    def since(self, before: SecondsOfSteps) -> SecondsOfSteps:
        """The difference."""
        return SecondsOfSteps(*(mine - theirs for mine, theirs in zip(self, before, strict=True)))

    def plus(self, other: SecondsOfSteps) -> SecondsOfSteps:
        """The sum."""
        return SecondsOfSteps(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class StepSeconds:
    """The sums, and the requests that join them next."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._planning = self._forward = self._execution = 0.0
        self._last_done = 0.0
        """When the last result was applied."""
        self._joining: deque[tuple[int, Sequence]] = deque()
        """Those whose first step waits for a step before it, with that first step."""

    def add_planning(self, seconds: float) -> None:
        """The scheduler has worked so long."""
        self._planning += seconds

    def done(self, record: StepRecord, forward: float, now: float) -> None:
        """A step is done."""
        self._forward += forward
        self._execution += now - max(record.launched, self._last_done)
        self._last_done = now
        while self._joining and self._joining[0][0] <= record.step + 1:
            self._note(self._joining.popleft()[1])

    def enter(self, sequence: Sequence) -> None:
        """It has a slot, and is in the next step that is planned."""
        if len(self._ledger):
            sequence.seconds_before = None
            self._joining.append((self._ledger.next_step, sequence))
        else:
            self._note(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It has its slot no longer."""
        if sequence.seconds_before is not None:
            spent = self._now().since(SecondsOfSteps(*sequence.seconds_before))
            sequence.seconds = SecondsOfSteps(*sequence.seconds).plus(spent)
            sequence.seconds_before = None

    def _note(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:  # else it has left already
            sequence.seconds_before = self._now()

    def _now(self) -> SecondsOfSteps:
        return SecondsOfSteps(self._planning, self._forward, self._execution)
