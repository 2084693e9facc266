"""The front doors in an application of asyncio, tested with pytest-asyncio as that application would test itself.

Only asyncio's own means are used: task groups, timeouts, queues. Most tests share one engine and one loop, those of the module;
the others have a loop each.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from actorllm import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from actorllm.errors import EngineShutdownError, InvalidParameterError, InvalidPromptError

PROMPT = "Once upon a time"
on_the_loop_of_the_module = pytest.mark.asyncio(loop_scope="module")
on_a_loop_of_its_own = pytest.mark.asyncio(loop_scope="function")

LOOPS: list[asyncio.AbstractEventLoop] = []
"""The one that the engine of the module was started on."""


def make_engine(**arguments: Any) -> AsyncLLM:
    return AsyncLLM("storyteller", num_threads=1, max_num_seqs=32, **arguments)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm() -> AsyncIterator[AsyncLLM]:
    LOOPS.append(asyncio.get_running_loop())
    async with make_engine() as engine:
        yield engine
    LOOPS.clear()


def short(num_tokens: int = 12, **arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **({"seed": 1} | arguments))


def endless(**arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, ignore_eos=True, seed=1, **arguments)


async def text_of(llm: AsyncLLM, seed: int = 1, num_tokens: int = 12) -> str:
    return "".join([piece async for piece in llm.stream(PROMPT, short(num_tokens, seed=seed))])


async def num_output_tokens(llm: AsyncLLM) -> int:
    count: int = (await llm.stats())["scheduler"]["scheduler"]["num_output_tokens"]
    return count


async def becomes_idle(llm: AsyncLLM) -> None:
    """No request anywhere, and every block is free."""

    async def is_busy() -> bool:
        stats = await llm.stats()
        scheduler = stats["scheduler"]["scheduler"]
        kv = scheduler["kv"]
        return bool(
            stats["frontend"]["num_requests"]
            or scheduler["num_running"]
            or scheduler["num_waiting"]
            or kv["num_free"] != kv["num_blocks"]
        )

    async with asyncio.timeout(20):
        while await is_busy():
            await asyncio.sleep(0.005)


async def is_cut_short(llm: AsyncLLM, use: Callable[[], Awaitable[object]]) -> None:
    """An endless request that `use` leaves behind goes away at once, and not by reaching the end of the context."""
    before = await num_output_tokens(llm)
    await use()
    await becomes_idle(llm)
    assert await num_output_tokens(llm) - before < 900, "it ran on"


# The loops --------------------------------------------------------------------------------------------------------------


@on_the_loop_of_the_module
async def test_a_test_shares_the_loop_of_the_fixture(llm: AsyncLLM) -> None:
    assert [asyncio.get_running_loop()] == LOOPS
    assert await text_of(llm)


@on_a_loop_of_its_own
async def test_the_engine_of_another_loop_streams_here_too(llm: AsyncLLM) -> None:
    assert [asyncio.get_running_loop()] != LOOPS
    text = await text_of(llm)
    assert text == await text_of(llm)
    assert text


# Streaming --------------------------------------------------------------------------------------------------------------


@on_the_loop_of_the_module
async def test_pieces_are_the_text_of_the_whole(llm: AsyncLLM) -> None:
    pieces = [piece async for piece in llm.stream(PROMPT, short(40))]
    whole = await llm.complete(PROMPT, short(40))
    assert "".join(pieces) == whole.outputs[0].text
    assert whole.outputs[0].finish_reason == "length"
    assert len(whole.outputs[0].token_ids) == 40


@on_the_loop_of_the_module
async def test_streams_of_a_task_group_do_not_mix(llm: AsyncLLM) -> None:
    alone = {seed: await text_of(llm, seed) for seed in range(4)}
    async with asyncio.TaskGroup() as tasks:
        together = [
            (seed, tasks.create_task(text_of(llm, seed))) for seed in (0, 1, 2, 3) * 10
        ]  # more than have a slot
    assert [(seed, task.result()) for seed, task in together] == [(seed, alone[seed]) for seed, _ in together]
    assert len(set(alone.values())) == 4


@on_the_loop_of_the_module
async def test_gathered_completions_come_in_the_order_of_the_call(llm: AsyncLLM) -> None:
    lengths = [9, 1, 5, 3]
    outputs = await asyncio.gather(*[llm.complete(PROMPT, short(n), request_id=f"r{n}") for n in lengths])
    assert [o.request_id for o in outputs] == [f"r{n}" for n in lengths]
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths


@on_the_loop_of_the_module
async def test_a_bad_request_fails_alone_among_gathered_ones(llm: AsyncLLM) -> None:
    good, bad = await asyncio.gather(
        llm.complete(PROMPT, short()), llm.complete("word " * 5000, short()), return_exceptions=True
    )
    assert isinstance(bad, InvalidPromptError)
    assert isinstance(good, RequestOutput)
    assert len(good.outputs[0].token_ids) == 12
    with pytest.raises(InvalidParameterError, match="temperature"):
        llm.generate(PROMPT, short(temperature=-1.0))


@on_the_loop_of_the_module
async def test_a_producer_hands_its_stream_on_through_a_queue(llm: AsyncLLM) -> None:
    queue: asyncio.Queue[str | None] = asyncio.Queue(maxsize=1)

    async def produce() -> None:
        async for piece in llm.stream(PROMPT, short(20)):
            await queue.put(piece)
        await queue.put(None)

    pieces: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        while (piece := await queue.get()) is not None:
            pieces.append(piece)
    assert "".join(pieces) == await text_of(llm, num_tokens=20)


@on_the_loop_of_the_module
async def test_an_engine_without_a_loop_serves_a_thread_of_the_application(llm: AsyncLLM) -> None:
    """`LLM` blocks its caller; the loop goes on meanwhile."""

    def offline() -> str:
        with LLM("storyteller", num_threads=1, max_num_seqs=8) as blocking:
            (output,) = blocking.generate(PROMPT, short(), use_tqdm=False)
            return output.outputs[0].text

    text, streamed = await asyncio.gather(asyncio.to_thread(offline), text_of(llm))
    assert text == streamed


# Cancelling -------------------------------------------------------------------------------------------------------------


@on_the_loop_of_the_module
async def test_a_cancelled_task_ends_its_request_and_no_other(llm: AsyncLLM) -> None:
    is_streaming = asyncio.Event()

    async def consume() -> None:
        async for _ in llm.stream(PROMPT, endless()):
            is_streaming.set()

    async def use() -> None:
        expected = await text_of(llm, num_tokens=60)
        task, other = asyncio.create_task(consume()), asyncio.create_task(text_of(llm, num_tokens=60))
        await is_streaming.wait()
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task
        assert task.cancelled()
        assert await other == expected

    await is_cut_short(llm, use)


@on_the_loop_of_the_module
async def test_a_task_cancelled_before_its_first_token(llm: AsyncLLM) -> None:
    async def use() -> None:
        task = asyncio.create_task(llm.complete(PROMPT, endless()))
        await asyncio.sleep(0)
        assert task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await is_cut_short(llm, use)


@on_the_loop_of_the_module
async def test_of_two_that_race_the_second_is_cancelled(llm: AsyncLLM) -> None:
    async def use() -> None:
        racers = {asyncio.create_task(llm.complete(PROMPT, params)) for params in (short(4), endless())}
        done, pending = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        (winner,), (loser,) = done, await asyncio.gather(*pending, return_exceptions=True)
        assert len(winner.result().outputs[0].token_ids) == 4
        assert isinstance(loser, asyncio.CancelledError)

    await is_cut_short(llm, use)


@on_the_loop_of_the_module
async def test_abort_from_another_task_ends_the_stream_in_order(llm: AsyncLLM) -> None:
    is_streaming = asyncio.Event()

    async def consume() -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        async for output in llm.generate(PROMPT, endless(output_kind=RequestOutputKind.DELTA), request_id="x"):
            outputs.append(output)
            is_streaming.set()
        return outputs

    async def use() -> None:
        task = asyncio.create_task(consume())
        await is_streaming.wait()
        await llm.abort("x")
        outputs = await task
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "abort"

    await is_cut_short(llm, use)


# Timeouts ---------------------------------------------------------------------------------------------------------------


@on_the_loop_of_the_module
async def test_a_timeout_around_a_stream_ends_its_request(llm: AsyncLLM) -> None:
    pieces: list[str] = []
    limit = asyncio.timeout(None)

    async def consume() -> None:
        async with limit:
            async for piece in llm.stream(PROMPT, endless()):
                pieces.append(piece)
                limit.reschedule(asyncio.get_running_loop().time())

    async def use() -> None:
        with pytest.raises(TimeoutError):
            await consume()

    await is_cut_short(llm, use)
    assert limit.expired()
    assert pieces


@on_the_loop_of_the_module
async def test_wait_for_ends_a_completion(llm: AsyncLLM) -> None:
    async def use() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.complete(PROMPT, endless()), 0.05)

    await is_cut_short(llm, use)


@on_the_loop_of_the_module
async def test_a_timeout_that_is_not_reached_changes_nothing(llm: AsyncLLM) -> None:
    async with asyncio.timeout(50) as limit:
        text = await text_of(llm)
    assert not limit.expired()
    assert text == await text_of(llm)


@on_the_loop_of_the_module
async def test_the_timeout_of_a_request_is_no_exception(llm: AsyncLLM) -> None:
    """Asked for in the request, the limit leaves what there is."""
    output = await llm.complete(PROMPT, endless(), timeout=0.1)
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].stop_reason == "deadline"
    await becomes_idle(llm)


# Blocks that end ------------------------------------------------------------------------------------------------------------


@on_the_loop_of_the_module
async def test_a_with_block_around_a_stream_ends_its_request(llm: AsyncLLM) -> None:
    async def use() -> None:
        async with llm.generate(PROMPT, endless()) as outputs:
            async for output in outputs:
                assert not output.finished
                break
        assert [output async for output in outputs] == []

    await is_cut_short(llm, use)


@on_the_loop_of_the_module
async def test_a_generator_of_the_application_ends_its_request_with_itself(llm: AsyncLLM) -> None:
    async def lines() -> AsyncIterator[str]:
        async with llm.stream(PROMPT, endless()) as pieces:
            async for piece in pieces:
                yield piece.upper()

    async def use() -> None:
        async with aclosing(lines()) as upper:  # type: ignore[type-var]
            assert await anext(upper)

    await is_cut_short(llm, use)


@on_the_loop_of_the_module
async def test_an_exception_in_the_consumer_ends_its_request(llm: AsyncLLM) -> None:
    async def consume() -> None:
        async for piece in llm.stream(PROMPT, endless()):
            raise LookupError(piece)

    async def use() -> None:
        with pytest.raises(LookupError):
            await consume()

    await is_cut_short(llm, use)
    assert len((await llm.complete(PROMPT, short())).outputs[0].token_ids) == 12


@on_the_loop_of_the_module
async def test_a_consumer_that_fails_takes_the_streams_of_its_group_with_it(llm: AsyncLLM) -> None:
    num_streaming = 0
    all_are = asyncio.Event()

    async def consume(fails: bool) -> None:
        nonlocal num_streaming
        async with llm.stream(PROMPT, endless()) as pieces:
            await anext(pieces)
            num_streaming += 1
            if num_streaming == 4:
                all_are.set()
            async for _ in pieces:
                if fails and all_are.is_set():
                    raise LookupError("no such page")

    async def consume_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(consume(fails=number == 0))

    async def use() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            await consume_all()
        assert [type(error) for error in raised.value.exceptions] == [LookupError]

    await is_cut_short(llm, use)


# The end of the engine ------------------------------------------------------------------------------------------------------


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until_ended(before: set[threading.Thread]) -> None:
    """Threads of the engine end at once; one that has handed over its result may need a moment to get there."""
    async with asyncio.timeout(10):
        while not engine_threads() <= before:
            await asyncio.sleep(0.01)


def engine_threads() -> set[threading.Thread]:
    """All but the main one and those that wait in a loop's pools for more to do, until the loop ends."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    return {thread for thread in others if not thread.name.startswith(("AnyIO worker", "asyncio_"))}


@on_a_loop_of_its_own
async def test_nothing_is_left_of_the_engine_of_a_with_block() -> None:
    """Processes and threads here; descriptors and shared memory by the check around every test."""
    threads = engine_threads()
    async with make_engine() as engine:
        pids = list(engine._engine.pids.values())
        assert len(pids) == 2
        assert engine_threads() > threads
        assert await text_of(engine)
    assert all(is_gone(pid) for pid in pids)
    await until_ended(threads)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(EngineShutdownError):
        await engine.complete(PROMPT, short())


@on_a_loop_of_its_own
async def test_an_exception_in_the_block_of_an_engine_ends_the_engine_and_stays_itself() -> None:
    engine = make_engine(topology="inline")

    async def application() -> None:
        async with engine, engine.stream(PROMPT, endless()) as pieces:
            await anext(pieces)
            raise LookupError("no such page")

    threads = engine_threads()
    with pytest.raises(LookupError, match="no such page"):
        await application()
    assert engine.is_stopped
    await until_ended(threads)


@on_a_loop_of_its_own
async def test_shutdown_ends_what_streams_and_each_consumer_is_told() -> None:
    engine = make_engine(topology="inline")
    are_streaming = [asyncio.Event() for _ in range(3)]

    async def consume(is_streaming: asyncio.Event) -> None:
        async for _ in engine.stream(PROMPT, endless()):
            is_streaming.set()

    tasks = [asyncio.create_task(consume(event)) for event in are_streaming]
    for event in are_streaming:
        await event.wait()
    await asyncio.to_thread(engine.shutdown)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineShutdownError] * 3
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_a_loop_of_its_own
async def test_a_timeout_around_the_start_leaves_nothing() -> None:
    threads = engine_threads()
    engine = make_engine()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await engine.start()
    engine.shutdown()
    assert engine._engine.pids == {}
    await until_ended(threads)
