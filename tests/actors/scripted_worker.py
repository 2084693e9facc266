"""A worker actor whose model is the scripted worker of the scheduler's tests: no torch, every token checkable."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np

from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.messages import LateInputs, StepPlan, StepResult
from tests.scheduling.conftest import ScriptedWorker

VOCAB = 4096


class ScriptedRunner:
    """What WorkerActor needs of a ModelRunner."""

    is_torn = False
    ranks = SimpleNamespace(close=lambda: None)

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self.block_size = config.cache.block_size
        self.rank = rank
        self.worker: ScriptedWorker

    def profile_num_blocks(self) -> int:
        return 100 - 20 * self.rank

    def allocate(self, num_blocks: int) -> None:
        self.worker = ScriptedWorker(self.block_size, num_blocks, vocab=VOCAB)

    def forget_requests(self) -> None:
        self.allocate(self.worker.num_blocks)

    def start_profile(self) -> None:
        self.is_profiling = True

    def stop_profile(self, folder: str, prefix: str = "") -> str:
        assert self.is_profiling
        return f"{folder}/rank{self.rank}"

    def discard(self) -> None:
        pass

    @staticmethod
    def is_memory_shortage(error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def execute(self, plan: StepPlan) -> StepPlan:
        if plan.new_tokens.size and 4095 in plan.new_tokens:
            raise RuntimeError("the model does not like token 4095")
        if np.count_nonzero(plan.new_tokens == 4094) > 2:
            raise MemoryError("three requests with token 4094 are too much")
        if plan.new_tokens.size and 4093 in plan.new_tokens:
            time.sleep(60)
        return plan

    def sample(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        return self.worker.run(plan, late)


class ScriptedWorkerActor(WorkerActor):
    def _load(self, config: EngineConfig) -> Any:
        return ScriptedRunner(config, self.rank)


DEADLY = 4094
"""A token that the process dies of."""


class DeadlyRunner(ScriptedRunner):
    def execute(self, plan: StepPlan) -> StepPlan:
        if plan.new_tokens.size and DEADLY in plan.new_tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(plan)


class DeadlyWorkerActor(WorkerActor):
    def _load(self, config: EngineConfig) -> Any:
        return DeadlyRunner(config, self.rank)


class SlowRunner(ScriptedRunner):
    """Steps that take as long as those of a small model, so that a stream is under way for seconds."""

    def execute(self, plan: StepPlan) -> StepPlan:
        time.sleep(0.004)
        return super().execute(plan)


class SlowWorkerActor(WorkerActor):
    """Also waits with its start while the file that ACTORLLM_TEST_WAIT names is not there, and fails if it says so."""

    async def on_start(self, config: EngineConfig) -> dict[str, Any]:
        if "ACTORLLM_TEST_WAIT" in os.environ:
            waited_for = anyio.Path(os.environ["ACTORLLM_TEST_WAIT"])
            while not await waited_for.exists():
                await anyio.sleep(0.005)
            if await waited_for.read_text():
                raise RuntimeError("told to fail")
        return await super().on_start(config)

    def _load(self, config: EngineConfig) -> Any:
        return SlowRunner(config, self.rank)
