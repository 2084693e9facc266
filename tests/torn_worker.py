"""A worker of several ranks, one of which leaves a step between two collectives, or never leaves it."""

from __future__ import annotations

import time
from typing import Any

import torch

from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.messages import StepPlan

RAISES, HANGS = 330, 329
"""Prompt tokens that rank 1 does not take."""


class TornWorkerActor(WorkerActor):
    def _load(self, config: EngineConfig) -> Any:
        runner = super()._load(config)
        right_execute, right_sum = runner.execute, runner.ranks.sum_
        planted: list[int] = []

        def execute(plan: StepPlan) -> Any:
            planted[:] = [token for token in (RAISES, HANGS) if token in plan.new_tokens]
            return right_execute(plan)

        def sum_(x: torch.Tensor) -> torch.Tensor:
            if planted == [RAISES]:
                raise RuntimeError("planted between two collectives")
            if planted == [HANGS]:
                time.sleep(60)
            return right_sum(x)

        if self.rank == 1:
            runner.execute, runner.ranks.sum_ = execute, sum_  # type: ignore[method-assign]
        return runner
