"""A worker actor alone, over a scripted model, and plans for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from actorllm.actors.engine_thread import HostLoop
from actorllm.config import EngineConfig
from actorllm.messages import StepPlan, Submit
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.scheduler import Scheduler
from tests.actors.scripted_worker import VOCAB, ScriptedRunner, ScriptedWorkerActor


class FakeLink:
    is_open = True

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_nowait(self, message: Any) -> None:
        self.sent.append(message)

    def finish(self) -> None:
        """Nothing has arrived unnoticed."""


def make_worker(rank: int) -> tuple[ScriptedWorkerActor, FakeLink, Any]:
    worker = ScriptedWorkerActor(rank=rank)
    worker._wakeup = HostLoop.current().waiter()
    worker.runner = ScriptedRunner(EngineConfig.from_arguments("storyteller"), rank)  # type: ignore[assignment]
    worker.on_configure(dataclasses.replace(EngineConfig.from_arguments("storyteller").resolved(64)))
    link: Any = FakeLink()
    worker._scheduler = link
    scheduler = Scheduler(
        num_blocks=64,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=1024,
        vocab_size=VOCAB,
        eos_token_ids=(),
        policy=load_policy("fcfs"),
    )
    return worker, link, scheduler


def plan_for(scheduler: Scheduler, **overrides: Any) -> StepPlan:
    scheduler.submit(0, Submit(rid=1, arrival=0.0, prompt=np.array([5, 6], np.int32), max_tokens=4, **overrides), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan
