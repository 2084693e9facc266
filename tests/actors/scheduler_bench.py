"""A scheduler actor alone, over a scripted model: its links record what is sent, and can be full."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np

from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.scheduler import SchedulerActor
from actorllm.config import EngineConfig
from actorllm.errors import WouldBlock
from actorllm.messages import (
    KIND_OF,
    LateInputs,
    Outputs,
    StepPlan,
    Submit,
)
from actorllm.messages.schema import FRONTEND, SCHEDULER, violation
from tests.scheduling.chained_tokens import ScriptedWorker

VOCAB = 4096


class FakeLink:
    """Records what is sent; full while `is_full`."""

    def __init__(self, name: str, rank: int = 0, on_send: Callable[[Any], None] | None = None) -> None:
        self.name = self.peer = name
        self.rank = rank
        self.generation = 1
        self.is_open = True
        self.is_full = False
        self.sent: list[Any] = []
        self.on_send = on_send

    def send_nowait(self, message: Any) -> None:
        if type(message) in KIND_OF:  # some tests send words
            assert None in (violation(message, SCHEDULER), violation(message, FRONTEND)), message
        if self.is_full:
            raise WouldBlock(self.name)
        self.sent.append(message)
        if self.on_send is not None:
            self.on_send(message)


class Bench:
    """A scheduler actor between a frontend and workers that answer when told."""

    def __init__(self, world_size: int = 1, **arguments: Any) -> None:
        config = EngineConfig.from_arguments("storyteller", max_num_seqs=4, **arguments).resolved(80)
        self.config = dataclasses.replace(config, world_size=world_size)
        self.actor = SchedulerActor()
        self.model = ScriptedWorker(16, 80, vocab=VOCAB)
        self.frontend = FakeLink("frontend")
        self.workers = FakeLink("workers")
        self.ranks = [FakeLink("workers", rank) for rank in range(world_size)]
        self.late: dict[int, LateInputs] = {}
        self.progress: list[None] = []
        self.defects: list[tuple[int, str]] = []

    @property
    def plans(self) -> list[StepPlan]:
        return [m for m in self.workers.sent if isinstance(m, StepPlan)]

    @property
    def outputs(self) -> list[Outputs]:
        return self.frontend.sent

    def text(self) -> str:
        return "".join(o.text for o in self.outputs)

    def ends(self) -> list[list[Any]]:
        outputs = [o for o in self.outputs if isinstance(o, Outputs)]
        return [[int(o.rids[e[0]]), *e[1:4]] for o in outputs for e in o.ends]

    def tokens(self) -> list[int]:
        return [t for o in self.outputs for t in o.tokens.tolist()]

    async def settle(self) -> None:
        await anyio.wait_all_tasks_blocked()

    async def send(self, message: Any, link: FakeLink | None = None) -> None:
        self.actor.on_message(link or self.frontend, message)  # type: ignore[arg-type]
        self.actor.on_batch()
        await self.settle()

    async def work(self, max_steps: int = 200) -> None:
        """Answer every plan, one at a time, until none is left."""
        await self.work_from(0, max_steps)

    async def work_from(self, begin: int, max_steps: int = 200) -> None:
        for done in range(begin, begin + max_steps):
            if done == len(self.plans):
                return
            plan = self.plans[done]
            late = [m for m in self.workers.sent if isinstance(m, LateInputs) and m.step == plan.step]
            await self.send(self.model.run(plan, late[0] if late else None), self.ranks[0])
        raise AssertionError("not done")


@asynccontextmanager
async def running(**arguments: Any) -> AsyncIterator[Bench]:
    bench = Bench(**arguments)
    actor = bench.actor
    actor._wakeup = HostLoop.current().waiter()
    actor._runner = SimpleNamespace(  # type: ignore[assignment]
        report_progress=lambda: bench.progress.append(None),
        report_defect=lambda link, what: bench.defects.append((link.rank, what)),
    )
    await actor.on_start(bench.config)
    actor.on_configure(bench.config)
    actor.on_link(bench.workers)  # type: ignore[arg-type]
    actor.on_link(bench.frontend)  # type: ignore[arg-type]
    actor.is_running = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await bench.settle()
        yield bench
        actor.is_running = False
        actor.wake()
    await actor.on_stop()


def submit(rid: int = 1, **overrides: Any) -> Submit:
    columns: dict[str, Any] = {
        "prompt": np.array([0, 500 + rid], np.int32),
        "max_tokens": 8,
        "seed": rid,
        "ignore_eos": True,
    }
    return Submit(rid=rid, arrival=0.0, **columns | overrides)
