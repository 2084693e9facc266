"""A runner that launches ahead, whose steps end when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actorllm.errors import EngineError
from actorllm.messages import LateInputs, StepPlan, StepResult
from tests.model.driver import int32


@dataclass(eq=False)
class Handle:
    step: int
    waits_for: bool
    waits_for_tokens: bool
    is_done: bool = False
    started: float = 0.0

    def waiter(self) -> Callable[[], None]:
        return list


@dataclass
class Runner:
    """Knows what was asked of it, in order."""

    asked: list[Any] = field(default_factory=list)
    handles: dict[int, Handle] = field(default_factory=dict)
    is_torn: bool = False
    is_able: bool = True
    wants_to_record: bool = False
    can_record: bool = True

    def execute(self, plan: StepPlan) -> Handle:
        self.asked.append(("execute", plan.step))
        if plan.freed.size:
            raise RuntimeError("no")
        needs_tokens = bool(plan.zero_blocks.size)  # as the plans of these tests say it
        waits = needs_tokens or bool(plan.late_slots.size)
        handle = self.handles[plan.step] = Handle(plan.step, waits, needs_tokens)
        return handle

    @staticmethod
    def waits_for_results(plan: StepPlan) -> bool:
        return plan.max_drafts > 0

    def choose(self, handle: Handle, late: LateInputs | None) -> None:
        self.asked.append(("choose", handle.step, late is not None))
        handle.waits_for = False

    def finish(self, handle: Handle) -> StepResult:
        assert handle.is_done
        self.asked.append(("finish", handle.step))
        return StepResult(step=handle.step, tokens=int32([1]))

    def record_next(self) -> bool:
        self.asked.append("record")
        self.wants_to_record = False
        if not self.can_record:
            raise RuntimeError("no")
        return True

    def start_profile(self) -> None:
        self.asked.append("profile")

    def discard(self) -> None:
        self.asked.append("discard")

    def forget_requests(self) -> None:
        self.asked.append("forget")

    def check_itself(self) -> None:
        self.asked.append("check")
        if not self.is_able:
            raise EngineError("it cannot")

    @staticmethod
    def is_memory_shortage(error: Exception) -> bool:
        return False
