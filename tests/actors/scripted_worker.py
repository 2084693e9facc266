"""A worker actor whose model is the scripted worker of the scheduler's tests: no torch, every token checkable."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from actorllm.actors.link import Link
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.messages import LateInputs, NewRow, Reply, StepFailed, StepPlan, StepResult, Submit, pack_rows
from tests.scheduling.chained_tokens import ScriptedWorker

VOCAB = 4096

CHECK_PLAN = StepPlan(
    step=0,
    new_rows=pack_rows([NewRow(0, 1)]),
    new_tokens=np.array([1], np.int32),
    new_num_blocks=np.array([1], np.int32),
    new_blocks=np.array([0], np.int32),
    prefill_slots=np.array([0], np.int32),
    prefill_counts=np.array([1], np.int32),
)
"""One token of nobody."""


class ScriptedRunner:
    """What WorkerActor needs of a ModelRunner."""

    is_torn = False
    launches_ahead = False
    weight_bytes = 0
    block_bytes = 0
    cache_window = None
    num_snapshots = None
    scheme = None

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self.block_size = config.cache.block_size
        self.rank = rank
        self.vector_size = 2 if config.model.pooler is None else config.model.pooler.vector_size
        self.worker: ScriptedWorker

    def profile_num_blocks(self) -> int:
        return 100 - 20 * self.rank

    def allocate(self, num_blocks: int) -> None:
        self.worker = ScriptedWorker(self.block_size, num_blocks, vocab=VOCAB, vector_size=self.vector_size)

    def forget_requests(self) -> None:
        self.allocate(self.worker.num_blocks)

    def start_profile(self) -> None:
        self.is_profiling = True

    def stop_profile(self, folder: str, prefix: str = "") -> str:
        assert self.is_profiling
        return f"{folder}/rank{self.rank}"

    def limit_threads(self, num_threads: int) -> None:
        pass

    def statistics(self) -> dict[str, Any]:
        return {}

    def discard(self) -> None:
        pass

    def close(self) -> None:
        pass

    @staticmethod
    def is_memory_shortage(error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def check_itself(self) -> None:
        kept = getattr(self, "worker", None)
        self.allocate(1)
        try:
            if self.sample(self.execute(CHECK_PLAN)).came_to_nothing:
                raise RuntimeError("nothing is finite")
        finally:
            if kept is not None:
                self.worker = kept

    def execute(self, plan: StepPlan) -> StepPlan:
        if plan.new_tokens.size and 4095 in plan.new_tokens:
            raise RuntimeError("the model does not like token 4095")
        if np.count_nonzero(plan.new_tokens == 4094) > 2:
            raise MemoryError("three requests with token 4094 are too much")
        if plan.new_tokens.size and 4093 in plan.new_tokens:
            time.sleep(60)
        return plan

    def sample(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        started = time.monotonic()
        return replace(self.worker.run(plan, late), started=started, ended=time.monotonic())


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


BREAKING = 4091
"""A token after which the process can do nothing any more, and says so in every step."""
BLINDING = 4090
"""A token after which nothing is finite."""


class BreakingRunner(ScriptedRunner):
    """Breaks with one of the tokens above, or at its first step, or before it, as the file ACTORLLM_TEST_BROKEN says."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        super().__init__(config, rank)
        file = Path(os.environ.get("ACTORLLM_TEST_BROKEN", os.devnull))
        told = file.read_text()
        self.is_broken, self.is_blind = told == "for ever", False
        self.is_weak = told == "once"
        if self.is_weak:
            file.write_text("")

    def profile_num_blocks(self) -> int:
        self.check_itself()
        return super().profile_num_blocks()

    def execute(self, plan: StepPlan) -> StepPlan:
        self.is_broken |= BREAKING in plan.new_tokens or (self.is_weak and plan is not CHECK_PLAN)
        self.is_blind |= BLINDING in plan.new_tokens
        if self.is_broken:
            raise RuntimeError("the accelerator is gone")
        return super().execute(plan)

    def sample(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        result = super().sample(plan, late)
        if self.is_blind:
            result = replace(result, nonfinite_rows=np.arange(result.tokens.size, dtype=np.int32))
        return result


class BreakingWorkerActor(WorkerActor):
    def _load(self, config: EngineConfig) -> Any:
        return BreakingRunner(config, self.rank)


class PlainRunner(ScriptedRunner):
    """No token is special to it."""

    def execute(self, plan: StepPlan) -> StepPlan:
        return plan


class LyingWorkerActor(WorkerActor):
    """What it says of its tenth step cannot be; how, the next line of the file ACTORLLM_TEST_LIES says."""

    _num_reported = 0

    def _load(self, config: EngineConfig) -> Any:
        return PlainRunner(config, self.rank)

    def report(self, link: Link, message: Any) -> None:
        self._num_reported += 1
        lie = ""
        if self._num_reported == 10:
            file = Path(os.environ["ACTORLLM_TEST_LIES"])
            lie, _, rest = file.read_text().partition("\n")
            file.write_text(rest)
        for said in self._lie(lie, message):
            if said is None:
                link._channel.sender.send_nowait(99, [0, 0], [])  # type: ignore[attr-defined]
            else:
                super().report(link, said)

    @staticmethod
    def _lie(kind: str, true: StepResult) -> list[Any]:
        ids, step = true.tokens, true.step
        match kind:
            case "":
                return [true]
            case "twice":
                return [true, true]
            case "out of order":
                return [replace(true, step=step + 1), true]
            case "never asked":
                return [replace(true, step=step + 1000)]
            case "too many tokens":
                return [replace(true, tokens=np.append(ids, ids[:1]))]
            case "two of each":
                return [replace(true, tokens=np.repeat(ids, 2), counts=np.full(ids.size, 2, np.int32))]
            case "no such id":
                return [replace(true, tokens=ids + VOCAB)]
            case "no such row":
                return [replace(true, nonfinite_rows=np.array([ids.size], np.int32))]
            case "a row twice":
                return [replace(true, nonfinite_rows=np.array([1, 1], np.int32))]
            case "no such fault":
                return [StepFailed(step=step, error="planted", rows=np.array([99], np.int32))]
            case "fewer than none":
                return [replace(true, nonfinite_rows=ids[:1] * 0, nonfinite_counts=np.array([-5], np.int32))]
            case "vectors for tokens":
                return [replace(true, vector_rows=ids[:1] * 0, vectors=np.ones(2, np.float32))]
            case "another's message":
                return [Submit(rid=1, arrival=0.0, prompt=ids, max_tokens=1)]
            case "not a number":
                return [Reply(id="1")]  # type: ignore[arg-type]
            case "no frame":
                return [None]
            case "a token for a vector":
                return [StepResult(step=step, tokens=np.ones(1, np.int32))]
            case "neither":
                return [StepResult(step=step, counts=np.zeros(1, np.int32))]
            case "both":
                return [replace(true, tokens=np.ones(1, np.int32), counts=np.ones(1, np.int32))]
            case "an empty vector":
                return [replace(true, vectors=true.vectors[:0])]
            case "a narrow vector":
                return [replace(true, vectors=true.vectors[:-1])]
            case "a wide vector":
                return [replace(true, vectors=np.append(true.vectors, np.float32(0)))]
            case "not finite":
                return [replace(true, vectors=true.vectors * np.float32(np.nan))]
            case wrong if "=" in wrong:
                name, _, value = wrong.partition("=")
                return [replace(true, **{name: json.loads(value)})]
        raise AssertionError(kind)


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


class GatedRunner(PlainRunner):
    """Computes a step for every byte that a test writes into the pipe ACTORLLM_TEST_GATE. Other ranks than the first follow."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        super().__init__(config, rank)
        self._gate = os.open(os.environ["ACTORLLM_TEST_GATE"], os.O_RDWR)

    def execute(self, plan: StepPlan) -> StepPlan:
        if not self.rank:
            os.read(self._gate, 1)
        return super().execute(plan)

    def close(self) -> None:
        os.close(self._gate)


class GatedWorkerActor(WorkerActor):
    def _load(self, config: EngineConfig) -> Any:
        return GatedRunner(config, self.rank)
