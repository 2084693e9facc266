"""Several engines in one program: they start at once, share the cores, and one can make room for another."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from actorllm import LLM, AsyncLLM, LLMEngine, SamplingParams
from actorllm.client import engine_supervisor
from actorllm.client.engine import CACHE_MEMORY, Engine
from actorllm.errors import EngineError, EngineShutdownError
from actorllm.model import memory
from actorllm.model.threads import num_cores
from tests.actors.scripted_topology import with_workers
from tests.embedding.host_program import assert_gone, wait_until

pytestmark = pytest.mark.anyio

PROMPT = "Once upon a time"
SHORT = SamplingParams(max_tokens=12, ignore_eos=True, seed=4)
UNSEEDED = SamplingParams(max_tokens=12, ignore_eos=True)
"""Its seed is made of the engine's and of the request's number."""
SMALL: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "kv_cache_memory_bytes": 4 << 20}

TOPOLOGIES = pytest.mark.parametrize("topology", ["process", "inline"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make_llm() -> Iterator[Callable[..., AsyncLLM]]:
    llms: list[AsyncLLM] = []

    def make(**arguments: Any) -> AsyncLLM:
        llms.append(AsyncLLM("storyteller", **{**SMALL, **arguments}))
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()


@pytest.fixture
def light_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes import no torch: what a test looks at is in the host, and starts are many. Inline engines have the model."""
    topology = with_workers("SlowWorkerActor", inline_too=False)
    monkeypatch.setattr(engine_supervisor, "engine_topology", topology)


LIGHT = pytest.mark.usefixtures("light_workers")


async def tokens_of(llm: AsyncLLM, params: SamplingParams = SHORT) -> list[int]:
    return list((await llm.complete(PROMPT, params)).outputs[0].token_ids)


async def all_of(llms: list[AsyncLLM]) -> list[list[int]]:
    """The answers of all of them, asked at once; the first request starts an engine."""
    found: dict[int, list[int]] = {}

    async def one(number: int) -> None:
        found[number] = await tokens_of(llms[number])

    async with anyio.create_task_group() as tasks:
        for number in range(len(llms)):
            tasks.start_soon(one, number)
    return [found[number] for number in range(len(llms))]


def held_by_engines() -> dict[str, list[str]]:
    """What the engines of this process hold of it and of the machine."""
    gc.collect()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("actorllm")),
        "segments": sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"allm-{os.getpid():x}-")),
        "children": [
            child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
        ],
    }


def num_held() -> tuple[int, int]:
    """Open descriptors, and objects that hold weights or a cache."""
    runners = sum(type(one).__name__ in ("CpuRunner", "KVCache") for one in gc.get_objects())
    return len(os.listdir("/proc/self/fd")), runners


def is_no_more_held(before: dict[str, list[str]], num_before: tuple[int, int]) -> bool:
    """There may be less: what an earlier test left may end meanwhile."""
    is_less = all(set(held) <= set(before[name]) for name, held in held_by_engines().items())
    return is_less and all(now <= then for now, then in zip(num_held(), num_before, strict=True))


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


# At once --------------------------------------------------------------------------------------------------------------


async def test_three_engines_start_at_once_and_end_alone(make_llm: Callable[..., AsyncLLM]) -> None:
    llms = [make_llm(), make_llm(topology="inline"), make_llm()]
    first, second, third = await all_of(llms)
    assert first == second == third
    assert len(first) == 12
    pids = list(llms[0]._engine.pids.values())
    llms[0].shutdown()
    assert_gone(pids)
    assert await all_of(llms[1:]) == [first, first]


@pytest.mark.usefixtures("processes_are_execed")  # which have the environment of their own from the beginning
async def test_their_threads_share_the_cores(
    make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    llms = [make_llm(num_threads=None, cpu_share=1 / 3) for _ in range(2)]
    await all_of(llms)
    found = [environment_of(llm._engine.pids["worker0"])["OMP_NUM_THREADS"] for llm in llms]
    assert found == [str(max(1, num_cores() // 3))] * 2


async def test_their_caches_fit_into_the_memory_together(
    make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that has just enough for one; they start at once, and the order is not known."""
    alone = make_llm(kv_cache_memory_bytes=None, topology="inline")
    await alone.start()
    wanted = cache_bytes(alone)
    available = int(1.2 * wanted)
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    llms = [make_llm(kv_cache_memory_bytes=None, topology=topology) for topology in ("inline", "process")]
    first, *others = await all_of([alone, *llms])
    assert others == [first, first]
    sizes = sorted(map(cache_bytes, llms), reverse=True)
    left, slack = available - wanted, 0.05 * available  # a worker that computes holds more than it did
    assert 0 < sizes[0] <= left * memory.DEFAULT_CACHE_SHARE + slack
    assert 0 < sizes[1] <= (left - sizes[0]) * memory.DEFAULT_CACHE_SHARE + slack
    for llm in llms:
        llm.shutdown()
    await alone.unload()
    monkeypatch.undo()
    again = make_llm(kv_cache_memory_bytes=None, topology="inline")
    await again.start()
    assert cache_bytes(again) == wanted, "what the others had is free again"


def cache_bytes(llm: AsyncLLM) -> int:
    return CACHE_MEMORY._reservations[llm._engine].num_bytes


# Giving everything back -----------------------------------------------------------------------------------------------


@LIGHT
@TOPOLOGIES
async def test_unloading_gives_everything_back(make_llm: Callable[..., AsyncLLM], topology: str) -> None:
    llm, never = make_llm(topology=topology, seed=11), make_llm(topology=topology, seed=11)
    expected = [await tokens_of(never, UNSEEDED) for _ in range(3)]
    never.shutdown()
    before, num_before = held_by_engines(), num_held()
    found = []
    for _ in range(3):
        found.append(await tokens_of(llm, UNSEEDED))
        pids = list(llm._engine.pids.values())
        assert len(pids) == (2 if topology == "process" else 0)
        assert llm.is_running
        await llm.unload()
        assert_gone(pids)
        assert not llm.is_running
        assert not llm.is_stopped
        assert llm.health().state == "new"
        assert (await llm.stats())["scheduler"] is None, "looking at it starts nothing"
        told = f"{held_by_engines()}, {num_held()} after {before}, {num_before}"
        assert wait_until(lambda: is_no_more_held(before, num_before)), told
        assert llm._engine.prompts._tokenizer is None
        assert llm.config.cache.num_blocks is None, "decided anew by the next start"
    assert found == expected, "the seeds of requests go on where they were"


@LIGHT
@TOPOLOGIES
async def test_an_engine_with_an_open_request_is_not_unloaded(make_llm: Callable[..., AsyncLLM], topology: str) -> None:
    llm = make_llm(topology=topology)
    expected = await tokens_of(llm)
    stream = llm.generate(PROMPT, SHORT)
    await anext(stream)
    left = llm.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    await anext(left)
    with pytest.raises(EngineError, match=r"[12] requests are open"):
        await llm.unload()
    async with left:
        pass
    if not stream.has_ended:
        with pytest.raises(EngineError, match="1 requests are open"):
            await llm.unload()
    *_, last = [output async for output in stream]
    assert list(last.outputs[0].token_ids) == expected, "the refusal has changed nothing"
    await llm.unload()
    assert await tokens_of(llm) == expected


@LIGHT
async def test_requests_that_come_meanwhile_wait_for_the_next_start(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    expected = await tokens_of(llm)
    found: list[list[int]] = []

    async def ask() -> None:
        found.append(await tokens_of(llm))

    stop, is_stopping, may_stop = llm._engine._thread.stop, threading.Event(), threading.Event()

    def stop_later(timeout: float) -> None:
        is_stopping.set()
        assert may_stop.wait(30)
        stop(timeout)

    llm._engine._thread.stop = stop_later  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(llm.unload)
        await anyio.to_thread.run_sync(is_stopping.wait)
        for _ in range(3):
            tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        may_stop.set()
    assert found == [expected] * 3


@LIGHT
async def test_a_late_abort_of_an_earlier_life_ends_no_request(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    left = llm.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    await anext(left)
    mailbox = left.mailbox
    await left.aclose()
    await llm.unload()
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))  # as the first of its life, too
    await anext(stream)
    llm._engine._abort_mailbox(mailbox)
    *_, last = [output async for output in stream]
    assert last.outputs[0].finish_reason == "length"


@LIGHT
async def test_unloading_what_does_not_run(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    await llm.unload()
    assert llm.health().state == "new"
    expected = await tokens_of(llm)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(llm.unload)
    assert await tokens_of(llm) == expected
    llm.shutdown()
    with pytest.raises(EngineShutdownError):
        await llm.unload()


@LIGHT
async def test_a_start_under_way_is_not_unloaded(
    make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()
    right = Engine._start

    def start_later(engine: Engine) -> None:
        assert may_start.wait(30)
        right(engine)

    monkeypatch.setattr(Engine, "_start", start_later)
    llm = make_llm()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(llm.start)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineError, match="the engine is starting"):
            await llm.unload()
        may_start.set()
    assert len(await tokens_of(llm)) == 12


@LIGHT
@TOPOLOGIES
def test_llm_is_unloaded_and_answers_the_next_call(topology: str) -> None:
    with LLM("storyteller", topology=topology, **SMALL) as llm:
        (first,) = llm.generate(PROMPT, SHORT, use_tqdm=False)
        llm.unload()
        assert llm.stats()["workers"] is None
        assert llm.reset_prefix_cache()
        (second,) = llm.generate(PROMPT, SHORT, use_tqdm=False)
        assert second.outputs[0].token_ids == first.outputs[0].token_ids


@LIGHT
@TOPOLOGIES
def test_a_stepped_engine_is_unloaded_and_steps_again(topology: str) -> None:
    found = []
    with LLMEngine("storyteller", topology=topology, **SMALL) as engine:
        for number in range(2):
            engine.add_request(f"request {number}", PROMPT, SHORT)
            with pytest.raises(EngineError, match="1 requests are open"):
                engine.unload()
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            found.append(outputs[-1].outputs[0].token_ids)  # type: ignore[union-attr]
            engine.unload()
    assert found[0] == found[1]


@LIGHT
def test_an_engine_that_others_have_joined_is_not_unloaded() -> None:
    name = f"unload-{os.getpid()}"
    with LLM("storyteller", name=name, **SMALL) as owner, LLM.attach(name) as guest:
        with pytest.raises(EngineError, match="1 programs have joined"):
            owner.unload()
        with pytest.raises(EngineError, match="belongs to another process"):
            guest.unload()
        guest.shutdown()
        with ThreadPoolExecutor(1) as pool:  # the engine hears of the end a moment later
            pool.submit(wait_until, lambda: not owner._engine._attach_server.num_attached).result()  # type: ignore[union-attr]
        owner.unload()
        (output,) = owner.generate(PROMPT, SHORT, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@LIGHT
@TOPOLOGIES
async def test_unloading_gives_resident_memory_back(make_llm: Callable[..., AsyncLLM], topology: str) -> None:
    """An inline cache is written whole, so that all of it is resident. That of a worker process is in no memory of the host."""
    num_bytes = 256 << 20
    earlier = make_llm(topology=topology)
    await tokens_of(earlier)  # what is imported and allocated but once
    earlier.shutdown()
    gc.collect()
    before = resident_bytes()
    llm = make_llm(topology=topology, kv_cache_memory_bytes=num_bytes)
    for _ in range(2):
        await tokens_of(llm)
        pids = list(llm._engine.pids.values())
        if topology == "inline":
            for cache in [one for one in gc.get_objects() if type(one).__name__ == "KVCache"]:
                with torch.inference_mode():
                    cache.pool.zero_()
            del cache
            assert resident_bytes() - before > 0.9 * num_bytes, "what is not resident cannot be given back"
        await llm.unload()
        assert_gone(pids)
        assert wait_until(lambda: resident_bytes() - before < num_bytes // 4), resident_bytes() - before
