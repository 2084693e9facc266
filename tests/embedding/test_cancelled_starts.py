"""A start that is cancelled at any point leaves nothing; that no process, segment or descriptor is left is seen by a fixture."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, SamplingParams
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from tests.actors.scripted_topology import with_workers
from tests.embedding.host_program import children, wait_until

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("processes_are_execed", "nothing_of_it_is_left")]


def has_loaded_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("actorllm")}


def num_runners() -> int:
    """Objects that hold weights or a cache."""
    gc.collect()
    return sum(type(one).__name__ in ("CpuRunner", "KVCache") for one in gc.get_objects())


@pytest.fixture
def nothing_of_it_is_left() -> Iterator[None]:
    threads, runners = engine_threads(), num_runners()
    yield
    assert wait_until(lambda: not engine_threads() - threads), engine_threads() - threads
    assert wait_until(lambda: num_runners() <= runners, within_s=1), "weights or a cache are left"


class Start:
    """The start of an engine: how far it has come, and where it waits until it is cancelled."""

    def __init__(self) -> None:
        self._others = set(children())  # an earlier test may have left some that end meanwhile
        self.reached: set[str] = set()
        self._may_go_on = threading.Event()

    def reach(self, point: str, *, waits: bool = False) -> None:
        self.reached.add(point)
        if waits:
            assert self._may_go_on.wait(60)

    @property
    def pids(self) -> set[int]:
        return set(children()) - self._others

    async def cancel(self, llm: AsyncLLM, is_there: Callable[[Start], bool]) -> None:
        """Cancel it when it has come so far."""
        task = asyncio.create_task(llm.start())
        while not (is_there(self) or task.done()):  # on a busy machine it takes as long as the test may
            await asyncio.sleep(0.001)
        task.cancel()
        self._may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not self.pids


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """It waits when the worker has told the size of its cache, before the links are made: so it is not over too early."""
    made = Start()
    resolved = EngineConfig.resolved

    def note(config: EngineConfig, num_blocks: int, *facts: Any, **named: Any) -> EngineConfig:
        made.reach("the worker is ready", waits=True)
        return resolved(config, num_blocks, *facts, **named)

    monkeypatch.setattr(EngineConfig, "resolved", note)
    return made


async def check_start(llm: AsyncLLM) -> None:
    """It can be started again."""
    output = await llm.complete("Once", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


def is_ready(start: Start) -> bool:
    return "the worker is ready" in start.reached


POINTS: dict[str, Callable[[Start], bool]] = {
    "before anything": lambda start: True,
    "one process is made": lambda start: len(start.pids) >= 1,
    "both processes are made": lambda start: len(start.pids) >= 2,
    "the worker loads": lambda start: any(map(has_loaded_torch, start.pids)),
    "the worker is ready": is_ready,
}


@pytest.mark.parametrize("point", POINTS)
async def test_nothing_is_left(point: str, start: Start) -> None:
    llm = AsyncLLM("storyteller", num_threads=1)
    await start.cancel(llm, POINTS[point])
    if point == "the worker loads":
        await check_start(llm)
    llm.shutdown()


SEVERAL: dict[str, tuple[dict[str, Any], Callable[[Start], bool]]] = {
    "one replica of two is made": ({"data_parallel_size": 2}, lambda start: len(start.pids) >= 2),
    "both replicas are made": ({"data_parallel_size": 2}, lambda start: len(start.pids) >= 4),
    "a replica of two is ready": ({"data_parallel_size": 2}, is_ready),
    "one rank of two is made": ({"tensor_parallel_size": 2}, lambda start: len(start.pids) >= 2),
    "both ranks are ready": ({"tensor_parallel_size": 2}, is_ready),
}
"""What is started, and when its start is cancelled."""

QUICK = ("both replicas are made", "both ranks are ready")
ALSO = pytest.mark.slow(reason="the workers of a fleet load torch; one point of each is quick")


@pytest.mark.parametrize("point", [pytest.param(point, marks=[] if point in QUICK else ALSO) for point in SEVERAL])
async def test_nothing_is_left_of_several_workers(point: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner makes and ends their processes, whatever is computed there."""
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers("SlowWorkerActor"))
    how, is_there = SEVERAL[point]
    llm = AsyncLLM("storyteller", num_threads=1, **how)
    await start.cancel(llm, is_there)
    await check_start(llm)
    llm.shutdown()
    assert not start.pids


INLINE: dict[str, Callable[[Start], bool]] = {
    "before anything": lambda start: True,
    "its threads run": lambda start: any("worker0" in thread.name for thread in engine_threads()),
    "the model loads": lambda start: "the model loads" in start.reached,
    "the model is loaded": lambda start: "the model is loaded" in start.reached,
    "the worker is ready": is_ready,
}


@pytest.mark.parametrize("point", INLINE)
async def test_nothing_is_left_of_an_inline_start(point: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot be ended: it goes through what it is in, and then gives up everything."""
    load = WorkerActor._load

    def note(self: WorkerActor, config: EngineConfig) -> Any:
        start.reach("the model loads", waits=point == "the model loads")
        made = load(self, config)
        start.reach("the model is loaded", waits=point == "the model is loaded")
        return made

    monkeypatch.setattr(WorkerActor, "_load", note)
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1, kv_cache_memory_bytes=4 << 20)
    await start.cancel(llm, INLINE[point])
    if point == "the model loads":
        await check_start(llm)
    llm.shutdown()
