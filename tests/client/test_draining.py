"""Draining: what runs is finished, what comes is refused, what takes too long is aborted, and the answer says which."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

from actorllm import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    RequestStream,
    SamplingParams,
)
from actorllm.actors.worker import WorkerActor
from actorllm.errors import EngineDrainingError, EngineShutdownError, InvalidParameterError

PROMPT = "Once upon a time"
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make_llm() -> Iterator[Callable[..., AsyncLLM]]:
    engines: list[AsyncLLM] = []

    def make(**arguments: Any) -> AsyncLLM:
        engines.append(AsyncLLM("storyteller", **({"num_threads": 1, "topology": "inline"} | arguments)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def short(num_tokens: int = 20, **arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, **arguments)


async def last_of(stream: RequestStream) -> RequestOutput:
    *_, last = [output async for output in stream]
    return last


@pytest.mark.parametrize("topology", ["process", "inline"])
async def test_what_there_is_finishes_and_what_comes_is_refused(
    make_llm: Callable[..., AsyncLLM], topology: str
) -> None:
    llm = make_llm(topology=topology, max_num_seqs=2)
    streams = [llm.generate(PROMPT, short(100)) for _ in range(5)]  # some of them wait for a slot
    streams.append(llm.generate(PROMPT, short(10, output_kind=RequestOutputKind.FINAL_ONLY)))
    await streams[0].__anext__()
    answers: list[bool] = []

    async def drain() -> None:
        answers.append(await llm.drain(60))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineDrainingError, match="takes no new requests"):
            llm.generate(PROMPT)
        with pytest.raises(EngineShutdownError):
            await llm.complete(PROMPT)
        ends = [await last_of(stream) for stream in streams]
    assert answers == [True]
    assert [len(end.outputs[0].token_ids) for end in ends] == [100] * 5 + [10]
    assert llm.is_running, "whoever drains decides when to stop"
    assert await llm.drain() is True
    with pytest.raises(EngineDrainingError):
        llm.generate(PROMPT)


async def test_what_takes_too_long_is_aborted(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm(max_num_seqs=2)
    streams = [llm.generate(PROMPT, ENDLESS) for _ in range(3)]
    first = await streams[0].__anext__()
    assert await llm.drain(0.05) is False
    ends = [await last_of(stream) for stream in streams]
    assert [end.outputs[0].finish_reason for end in ends] == ["abort"] * 3
    assert ends[0].outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
    scheduler = (await llm.stats())["scheduler"]["scheduler"]
    assert scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"]


async def test_no_patience_at_all_and_nothing_to_do(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    assert await llm.drain(0) is True, "it was never started"
    assert not llm._engine.is_running
    with pytest.raises(EngineDrainingError):
        llm.generate(PROMPT)
    llm = make_llm()
    stream = llm.generate(PROMPT, ENDLESS)
    assert await llm.drain(0) is False
    assert (await last_of(stream)).outputs[0].finish_reason == "abort"
    with pytest.raises(InvalidParameterError, match="timeout=-1 must be a number of seconds of at least 0"):
        await llm.drain(-1)
    llm.shutdown()
    with pytest.raises(EngineShutdownError, match="was shut down"):
        await llm.drain()


async def test_streams_that_were_left_do_not_hold_it_up(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    await llm.generate(PROMPT, ENDLESS).__anext__()
    left = llm.generate(PROMPT, ENDLESS)
    await left.aclose()
    never_read = llm.generate(PROMPT, short())
    with anyio.fail_after(20):
        assert await llm.drain() is True
    assert len((await last_of(never_read)).outputs[0].token_ids) == 20


async def test_a_shutdown_ends_a_drain(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    stream = llm.generate(PROMPT, ENDLESS)
    await stream.__anext__()
    answers: list[bool] = []

    async def drain() -> None:
        answers.append(await llm.drain())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(llm.shutdown)
    assert answers == [False]
    with pytest.raises((EngineShutdownError, EngineDeadError)):
        await last_of(stream)


async def test_a_death_ends_a_drain(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm(topology="process", on_failure="raise")
    stream = llm.generate(PROMPT, ENDLESS)
    await stream.__anext__()
    answers: list[bool] = []

    async def drain() -> None:
        answers.append(await llm.drain())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        while not (await llm.stats())["scheduler"]["num_asks_owed"]:  # until it is asked to finish what it has
            await anyio.sleep(0.01)
        os.kill(llm._engine.pids["scheduler"], signal.SIGKILL)
    assert answers == [False]
    with pytest.raises(EngineDeadError):
        await last_of(stream)


async def test_a_scheduler_that_does_not_answer_holds_nobody_up(
    make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorllm.client.draining.STOP_TIMEOUT_S", 0.1)
    llm = make_llm(topology="process", heartbeat_timeout_s=120.0)
    stream = llm.generate(PROMPT, ENDLESS)
    await stream.__anext__()
    pid = llm._engine.pids["scheduler"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with anyio.fail_after(60):
            assert await llm.drain(0.05) is False
        assert not stream.has_ended
    finally:
        os.kill(pid, signal.SIGCONT)
    assert llm._engine.pids["scheduler"] == pid
    assert (await last_of(stream)).outputs[0].finish_reason == "abort"


async def test_who_drains_may_give_up(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    stream = llm.generate(PROMPT, short(200))
    await stream.__anext__()
    with anyio.move_on_after(0.01):
        await llm.drain()
    assert len((await last_of(stream)).outputs[0].token_ids) == 200


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Models load when it is set."""
    loading, load = threading.Event(), WorkerActor._load

    def wait(self: WorkerActor, config: Any) -> Any:
        assert loading.wait(60)
        return load(self, config)

    monkeypatch.setattr(WorkerActor, "_load", wait)
    yield loading
    loading.set()


async def test_the_time_counts_while_the_engine_starts(
    make_llm: Callable[..., AsyncLLM], loading: threading.Event
) -> None:
    llm = make_llm()
    streams = [
        llm.generate(PROMPT, short(n=number, output_kind=kind)) for number, kind in enumerate(RequestOutputKind, 1)
    ]
    with anyio.fail_after(30):
        assert await llm.drain(0.05) is False
        ends = [await last_of(stream) for stream in streams]
    assert [[one.finish_reason for one in end.outputs] for end in ends] == [["abort"] * n for n in (1, 2, 3)]
    assert [[one.token_ids for one in end.outputs] for end in ends] == [[[]] * n for n in (1, 2, 3)]
    loading.set()
    await llm.start()
    assert await llm.drain() is True
    assert (await llm.stats())["frontend"]["num_finished"] == 0, "what has ended is not begun"


async def test_requests_from_before_the_start_finish_if_there_is_time(
    make_llm: Callable[..., AsyncLLM], loading: threading.Event
) -> None:
    llm = make_llm()
    stream = llm.generate(PROMPT, short())
    answers: list[bool] = []

    async def drain() -> None:
        answers.append(await llm.drain(60))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        loading.set()
    assert answers == [True]
    assert len((await last_of(stream)).outputs[0].token_ids) == 20


async def test_who_gives_up_leaves_requests_going_on_beyond_the_time(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    stream = llm.generate(PROMPT, short(300))
    await stream.__anext__()
    with anyio.move_on_after(0.01):
        await llm.drain(0.1)
    assert len((await last_of(stream)).outputs[0].token_ids) == 300


def steps_of(engine: LLMEngine) -> dict[str, RequestOutput]:
    ends = {}
    while engine.has_unfinished_requests():
        ends |= {output.request_id: output for output in engine.step() if output.finished}
    return ends


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_the_engine_that_its_caller_steps(topology: str) -> None:
    with LLMEngine("storyteller", topology=topology, num_threads=1, max_num_seqs=2) as engine:
        for number in range(3):
            engine.add_request(str(number), PROMPT, short(30))
        engine.step()
        assert engine.drain(60) is True
        assert engine.health().state == "running"
        with pytest.raises(EngineDrainingError):
            engine.add_request("late", PROMPT, short())
        ends = steps_of(engine)
        assert {key: len(end.outputs[0].token_ids) for key, end in ends.items()} == dict.fromkeys("012", 30)
        assert engine.drain() is True
    with pytest.raises(EngineShutdownError):
        engine.drain()


def test_what_its_caller_has_no_time_to_step_is_aborted() -> None:
    with LLMEngine("storyteller", topology="inline", num_threads=1, max_num_seqs=2) as engine:
        for number in range(3):
            engine.add_request(str(number), PROMPT, ENDLESS)
        engine.step()
        assert engine.drain(0.05) is False
        ends = steps_of(engine)
        assert {key: end.outputs[0].finish_reason for key, end in ends.items()} == dict.fromkeys("012", "abort")
        assert any(end.outputs[0].token_ids for end in ends.values())
        scheduler = engine.stats()["scheduler"]["scheduler"]
        assert scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"]


def test_attached_programs_finish_as_well_and_may_leave_by_themselves() -> None:
    owner = LLM("storyteller", name="drained", topology="inline", num_threads=1)
    guest, other = AsyncLLM.attach("drained"), AsyncLLM.attach("drained")

    async def main() -> None:
        stays = guest.generate(PROMPT, short(300))
        mine = other.generate(PROMPT, short(30))
        await stays.__anext__()
        assert await other.drain(30) is True, "it waits for its own requests only"
        assert not stays.has_ended
        assert len((await last_of(mine)).outputs[0].token_ids) == 30
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(owner.drain(30)))
        thread.start()

        async def go_on() -> None:
            while True:
                await guest.complete(PROMPT, short(1))

        with pytest.raises(EngineDrainingError, match="about to stop"):
            await go_on()
        assert len((await last_of(stays)).outputs[0].token_ids) == 300
        await anyio.to_thread.run_sync(thread.join)
        assert answers == [True]

    anyio.run(main)
    for llm in (guest, other, owner):
        llm.shutdown()


def test_llm_drains_while_other_threads_wait_for_their_outputs() -> None:
    with LLM("storyteller", topology="inline", num_threads=1) as llm:
        outputs: list[RequestOutput] = []
        thread = threading.Thread(target=lambda: outputs.extend(llm.generate([PROMPT] * 3, short(100), use_tqdm=False)))
        thread.start()
        while not llm.stats()["scheduler"]["scheduler"]["num_running"]:
            pass
        assert llm.drain(60) is True
        thread.join()
        assert [len(output.outputs[0].token_ids) for output in outputs] == [100] * 3
        with pytest.raises(EngineDrainingError):
            llm.generate(PROMPT)
