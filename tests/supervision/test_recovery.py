"""SIGKILL under load: every stream is what it would have been, tokens flow again, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorllm import LLM, AsyncLLM, EngineDeadError, RequestOutput
from tests.model.ranks import model_folder
from tests.model.ranks import streams as streams_of_ranks
from tests.stories import Comparison, Request, Story, listen, make_requests
from tests.supervision.processes import is_gone

ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 32, "long_prefill_token_threshold": 32}
LOAD = make_requests(22, max_tokens=70)

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make_llm() -> Iterator[Callable[..., AsyncLLM]]:
    engines: list[AsyncLLM] = []

    def make(**arguments: Any) -> AsyncLLM:
        engines.append(AsyncLLM("storyteller", **(ENGINE | arguments)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def reference() -> list[Story]:
    """The same requests in an engine without processes, to which nothing happens."""

    async def run() -> list[Story]:
        llm = AsyncLLM("storyteller", topology="inline", **ENGINE)
        try:
            return await tell(llm, LOAD)
        finally:
            llm.shutdown()

    return anyio.run(run)


async def tell(llm: AsyncLLM, load: list[Request], on_output: Callable[[RequestOutput], object] = bool) -> list[Story]:
    stories: dict[int, Story] = {}

    async def one(number: int, request: Request) -> None:
        stories[number] = await listen(llm, request, on_output)

    async with anyio.create_task_group() as tasks:
        for number, request in enumerate(load):
            tasks.start_soon(one, number, request)
    return [stories[number] for number in range(len(load))]


class Killer:
    """Kills processes of an engine when so many outputs have been heard."""

    def __init__(self, llm: AsyncLLM, *plan: tuple[int, tuple[str, ...]]) -> None:
        self.llm = llm
        self.plan = list(plan)
        self.num_outputs = 0
        self.killed: list[int] = []

    def __call__(self, output: RequestOutput) -> None:
        self.num_outputs += 1
        if self.plan and self.num_outputs >= self.plan[0][0]:
            _, names = self.plan.pop(0)
            pids = self.llm._engine.pids
            for name in names:
                os.kill(pids[name], signal.SIGKILL)
                self.killed.append(pids[name])


def check(stories: list[Story], expected: list[Story]) -> Comparison:
    comparison = Comparison()
    for story, wanted in zip(stories, expected, strict=True):
        comparison.compare(story, wanted)
    assert comparison.differences == []
    assert comparison.num_lost == 0
    return comparison


@pytest.mark.parametrize("victims", [("scheduler",), ("worker0",), ("scheduler", "worker0")])
async def test_streams_go_on_over_a_kill(
    make_llm: Callable[..., AsyncLLM], reference: list[Story], victims: tuple[str, ...]
) -> None:
    """Among the first tokens, while prompts are computed, and in the middle."""
    llm = make_llm()
    await llm.start()
    killer = Killer(llm, (4, victims), (400, victims))
    stories = await tell(llm, LOAD, killer)
    assert len(killer.killed) == 2 * len(victims)
    assert all(is_gone(pid) for pid in killer.killed)
    check(stories, reference)
    assert sum(story.num_recoveries for story in stories) >= 20
    # What users and operators see of it.
    health = llm.health()
    assert health.state == "running"
    assert health.num_recoveries == 2 * len(victims)
    for name in ("scheduler", "worker0"):
        assert health.actors[name].num_restarts == (2 if name in victims else 0)
    stats = await llm.stats()
    assert stats["supervisor"]["num_recoveries"] == 2 * len(victims)
    assert stats["frontend"]["num_recoveries"] == 2 * ("scheduler" in victims)
    assert stats["frontend"]["num_requests"] == 0
    scheduler = stats["scheduler"]["scheduler"]
    assert scheduler["num_worker_losses"] == 2 * (victims == ("worker0",))
    assert scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"]
    assert len(stats["workers"]) == 1


async def test_killed_in_the_middle_of_a_recovery_and_of_the_first_start(
    make_llm: Callable[..., AsyncLLM], reference: list[Story]
) -> None:
    llm = make_llm()
    load = [LOAD[i] for i in (0, 1, 3, 5)]
    over = threading.Event()

    def kill_whoever_starts() -> None:
        """One of each before the engine has ever run; when it runs, both, and whoever takes their place."""
        seen: set[int] = set()
        for name in ("worker0", "scheduler", "", "worker0", "scheduler", "worker0", "scheduler"):
            while not over.is_set():
                pid = llm._engine.pids.get(name)
                if pid is not None and pid not in seen:
                    seen.add(pid)
                    os.kill(pid, signal.SIGKILL)
                if pid in seen or (not name and llm.health().state == "running"):
                    break
                over.wait(0.005)

    thread = threading.Thread(target=kill_whoever_starts)
    thread.start()
    try:
        stories = await tell(llm, load)
    finally:
        over.set()
        await anyio.to_thread.run_sync(thread.join)
    check(stories, [reference[i] for i in (0, 1, 3, 5)])
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="not dead"):
        raise llm.dead_error
    assert llm.health().state == "stopped"


def test_several_ranks_go_on_over_the_death_of_one(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    expected = streams_of_ranks(folder, topology="inline")
    killed: list[int] = []
    done = threading.Event()
    engines: list[Any] = []
    right = LLM.generate

    def generate(self: LLM, *args: Any, **arguments: Any) -> Any:
        def kill() -> None:
            while not done.is_set() and len(killed) < 2:
                output = self.stats()["scheduler"]["scheduler"]["num_output_tokens"]
                if output > 60 * len(killed) and set(self._engine.pids) == {"scheduler", "worker0", "worker1"}:
                    victim = ("worker1", "scheduler")[len(killed)]
                    killed.append(self._engine.pids[victim])
                    os.kill(killed[-1], signal.SIGKILL)
                done.wait(0.002)

        engines.append(self)
        self._engine.start()
        thread = threading.Thread(target=kill)
        thread.start()
        try:
            return right(self, *args, **arguments)
        finally:
            done.set()
            thread.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "generate", generate)
        assert streams_of_ranks(folder, tensor_parallel_size=2) == expected
    assert len(killed) == 2
    assert all(is_gone(pid) for pid in killed)


async def test_an_attached_frontend_goes_on_as_well(make_llm: Callable[..., AsyncLLM], reference: list[Story]) -> None:
    llm = make_llm(name="survivor")
    await llm.start()
    guest = AsyncLLM.attach("survivor")
    try:
        await guest.start()
        half = len(LOAD) // 2
        killer = Killer(llm, (100, ("scheduler",)), (300, ("worker0",)), (500, ("scheduler", "worker0")))
        stories: dict[int, list[Story]] = {}

        async def run(number: int, one: AsyncLLM, load: list[Request]) -> None:
            stories[number] = await tell(one, load, killer)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, 0, llm, LOAD[:half])
            tasks.start_soon(run, 1, guest, LOAD[half:])
        assert len(killer.killed) == 4
        check(stories[0] + stories[1], reference)
        assert guest.health().state == "running"
        assert guest.health().num_recoveries == 2
    finally:
        guest.shutdown()
