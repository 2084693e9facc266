"""Stages with a mistake in what they exchange, which the tests of equality must find, and a look at what stages keep."""

from __future__ import annotations

from typing import Any

import torch

from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.messages import I32
from actorllm.model.rank_worker import RankWorker


class WrongTokens(WorkerActor):
    """The last stage tells the first one other tokens than it reports."""

    def _load(self, config: EngineConfig) -> Any:
        runner: Any = super()._load(config)
        right = runner.stage.tell

        def tell(step: int, tokens: I32) -> None:
            right(step, (tokens + 1) % 300)

        runner.stage.tell = tell
        return runner


class WrongRows(WorkerActor):
    """States reach the next stage in another order than they were sent in."""

    def _load(self, config: EngineConfig) -> Any:
        runner: Any = super()._load(config)
        right = runner.stage.receive

        def receive(*arguments: Any) -> torch.Tensor:
            return torch.roll(right(*arguments), 1, 0)

        runner.stage.receive = receive
        return runner


def num_sent(worker: RankWorker) -> int:
    """How much this rank has sent that it still keeps."""
    stage: Any = worker.model_runner.stage
    return len(stage._sent)
