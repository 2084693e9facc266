"""A worker of several ranks, one of which leaves a step between two collectives, never leaves it, or spoils it."""

from __future__ import annotations

import time
from typing import Any

import torch

from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.messages import StepPlan
from actorllm.model.inputs import PersistentBatch

RAISES, HANGS, BLINDS, RAISES_BEFORE = 330, 329, 328, 327
"""Prompt tokens that rank 1 does not take: BLINDS spoils all that it computes from then on, RAISES_BEFORE the plan."""


class TornWorkerActor(WorkerActor):
    def _load(self, config: EngineConfig) -> Any:
        runner = super()._load(config)
        right_execute, right_apply, right_sum = runner.execute, PersistentBatch.apply, runner.ranks.sum_
        planted: list[int] = []
        is_blind: list[bool] = []

        def execute(plan: StepPlan) -> Any:
            planted[:] = [token for token in (RAISES, HANGS) if token in plan.new_tokens]
            is_blind.extend([True] * (BLINDS in plan.new_tokens))
            return right_execute(plan)

        def apply(batch: PersistentBatch, plan: StepPlan) -> None:
            if RAISES_BEFORE in plan.new_tokens:
                raise RuntimeError("planted before the collectives")
            right_apply(batch, plan)

        def sum_(x: torch.Tensor) -> torch.Tensor:
            if planted == [RAISES]:
                raise RuntimeError("planted between two collectives")
            if planted == [HANGS]:
                time.sleep(60)
            return right_sum(x.fill_(torch.nan) if is_blind else x)

        if self.rank == 1:
            PersistentBatch.apply = apply  # type: ignore[method-assign]
            runner.execute, runner.ranks.sum_ = execute, sum_  # type: ignore[method-assign]
        return runner
