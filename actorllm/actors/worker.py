"""The worker actor: a thin shell around `ModelRunner`, one per rank.

Steps are executed one after the other, in the order of their plans. A step that raises is answered with StepFailed and
the worker lives on; what the failed step left behind is dropped by the next plan, which frees every slot.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actorllm.actors.actor import Actor
from actorllm.actors.link import Link
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.messages import LateInputs, Message, StepFailed, StepPlan, StepResult

if TYPE_CHECKING:
    from actorllm.model.runner import ModelRunner

logger = logging.getLogger(__name__)


class WorkerActor(Actor):
    """Executes plans; only rank 0 reports tokens, the others acknowledge."""

    VERBS = (*Actor.VERBS, "start_profile", "stop_profile")

    def __init__(self, name: str = "worker0", rank: int = 0) -> None:
        super().__init__(name, rank)
        self._plans: deque[StepPlan] = deque()
        self._late: dict[int, LateInputs] = {}
        self._num_steps = 0
        self._num_failed = 0
        self._busy_s = 0.0
        self._profile_prefix = ""

    async def on_start(self, config: EngineConfig) -> dict[str, Any]:
        """Load the model and say how many KV blocks fit."""
        self.runner = self._load(config)
        return {"num_blocks": self.runner.profile_num_blocks()}

    def _load(self, config: EngineConfig) -> ModelRunner:
        from actorllm.model.runner import ModelRunner  # imports torch: only where a worker runs

        runner = ModelRunner(config, self.rank)
        runner.load()
        return runner

    def on_configure(self, config: EngineConfig) -> None:
        assert config.cache.num_blocks is not None
        self.runner.allocate(config.cache.num_blocks)

    def on_link(self, link: Link) -> None:
        self._scheduler = link

    async def on_stop(self) -> None:
        if hasattr(self, "runner"):
            self.runner.ranks.close()

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case StepPlan():
                self._plans.append(message)
            case LateInputs():
                self._late[message.step] = message
            case _:
                super().on_message(link, message)

    async def run(self) -> None:
        while self.is_running:
            if await self.turn():
                self._scheduler.finish()  # the next plan is there already: take it without waiting for its doorbell
                if self._plans:
                    self.wake()  # then the loop turns once, so that a stop is heard, and does not sleep
            await self.wait()

    async def turn(self) -> bool:
        """Execute the next plan. False: there is none."""
        if not self._plans:
            return False
        await self._step(self._plans.popleft())
        return True

    async def _step(self, plan: StepPlan) -> None:
        started = now()
        try:
            handle = self.runner.execute(plan)
            late = await self._late_inputs(plan.step) if plan.late_slots.size else None
            result = self.runner.sample(handle, late)
        except Exception as error:
            if self.runner.is_torn:
                raise  # the other ranks wait in a collective that this one will not enter
            logger.exception("step %d failed", plan.step)
            self._num_failed += 1
            self._late.pop(plan.step, None)
            self._scheduler.send_nowait(StepFailed(step=plan.step, error=f"{type(error).__name__}: {error}"))
            return
        ended = now()
        self._num_steps += 1
        self._busy_s += ended - started
        if self.rank:
            result = StepResult(step=plan.step)
        self._scheduler.send_nowait(replace(result, started=started, ended=ended))

    async def _late_inputs(self, step: int) -> LateInputs:
        """What sampling of this step still needs; the forward has been launched and runs meanwhile."""
        while step not in self._late:
            await self.wait()
        return self._late.pop(step)

    def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        match verb:
            case "start_profile":
                self.runner.start_profile()
                self._profile_prefix = arguments.get("prefix", "")
                return True
            case "stop_profile":
                return self.runner.stop_profile(arguments["folder"], self._profile_prefix)
        return super().answer(verb, arguments)

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            "num_steps": self._num_steps,
            "num_failed_steps": self._num_failed,
            "busy_s": round(self._busy_s, 6),
        }
