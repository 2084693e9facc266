"""`StepModelMonitor`: how well a step-time model tells what the steps of this engine take, for `stats()`.

The scheduler actor, which sees a step when it is launched and when its result is there, feeds it. It decides nothing: what a
policy plans by is its own affair, so that a recording of the scheduler's inputs says everything about its plans.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from actorllm.messages import StepFailed, StepResult
from actorllm.scheduling.cost_model import from_json
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_time import CorrectedStepTime, features_of


class StepModelMonitor:
    """Expects of every step what the model says, and learns what it took."""

    def __init__(self, step_model: str) -> None:
        """step_model: as in the configuration."""
        model = from_json(step_model)
        self._times = CorrectedStepTime(model, model.name)
        self._in_flight: deque[tuple[int, tuple[int, int, int, int, int]]] = deque()

    def launched(self, record: StepRecord, scheduler: Scheduler) -> None:
        """The newest step; nothing else was planned since."""
        self._in_flight.append((record.step, features_of(record, scheduler)))

    def done(self, result: StepResult | StepFailed) -> None:
        if isinstance(result, StepFailed):
            self.clear()  # those behind it are void as well
        while self._in_flight and self._in_flight[0][0] <= result.step:
            step, (p, d, context, before, pairs) = self._in_flight.popleft()
            if step == result.step and isinstance(result, StepResult):
                d += result.num_checked  # a draft costs about what a decode row does
                self._times.observe(p, d, context, result.ended - result.started, before, pairs)

    def clear(self) -> None:
        """The workers are lost, and the steps in flight with them."""
        self._in_flight.clear()

    def statistics(self) -> dict[str, Any]:
        return self._times.statistics()
