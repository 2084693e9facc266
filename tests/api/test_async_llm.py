"""`AsyncLLM` as an application uses it: streams, their ends, and several loops on one engine."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from actorllm import AsyncLLM, RequestOutput, RequestOutputKind, RequestStream, SamplingParams
from actorllm.errors import DuplicateRequestError, EngineShutdownError

PROMPT = "Once upon a time"
BACKENDS = [
    pytest.param(("asyncio", {}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]
on_every_backend = pytest.mark.parametrize("anyio_backend", BACKENDS)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_engine(topology: str) -> AsyncLLM:
    llm = AsyncLLM("storyteller", dtype="float32", topology=topology, num_threads=1, max_num_seqs=64)
    anyio.run(llm.start)
    return llm


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = make_engine("process")
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module", params=["process", "inline"])
def any_llm(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    """One engine of each topology; that of the process topology is the module's."""
    if request.param == "process":
        yield request.getfixturevalue("llm")
        return
    engine = make_engine("inline")
    yield engine
    engine.shutdown()


def endless(**arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, ignore_eos=True, seed=1, **arguments)


def short(num_tokens: int = 8, **arguments: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": num_tokens, "ignore_eos": True, "seed": 1} | arguments))


async def until(is_true: Callable[[], Awaitable[bool]], timeout_s: float = 20) -> None:
    with anyio.fail_after(timeout_s):
        while not await is_true():
            await anyio.sleep(0.005)


async def is_idle(llm: AsyncLLM) -> bool:
    """No request anywhere, and every block is free."""
    stats = await llm.stats()
    scheduler = stats["scheduler"]["scheduler"]
    return (
        stats["frontend"]["num_requests"] == 0
        and scheduler["num_running"] == scheduler["num_waiting"] == 0
        and scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"]
    )


async def becomes_idle(llm: AsyncLLM) -> None:
    await until(lambda: is_idle(llm))


@asynccontextmanager
async def is_cut_short(llm: AsyncLLM) -> AsyncIterator[None]:
    """What runs in here leaves nothing behind, and not because it ran to its end."""
    before = await llm.stats()
    yield
    await becomes_idle(llm)
    after = await llm.stats()
    counts = [stats["scheduler"]["scheduler"]["num_output_tokens"] for stats in (before, after)]
    assert counts[1] - counts[0] < 900, "it ran on"


async def outputs_of(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def first_of(stream: RequestStream) -> RequestOutput:
    return await stream.__anext__()


# Outputs ------------------------------------------------------------------------------------------------------------


async def test_the_three_output_kinds_tell_the_same_story(any_llm: AsyncLLM) -> None:
    outputs: dict[RequestOutputKind, list[RequestOutput]] = {}

    async def collect(kind: RequestOutputKind) -> None:
        outputs[kind] = await outputs_of(any_llm.generate(PROMPT, short(24, output_kind=kind)))

    async with anyio.create_task_group() as tasks:
        for kind in RequestOutputKind:
            tasks.start_soon(collect, kind)

    (final,) = outputs[RequestOutputKind.FINAL_ONLY]
    text, token_ids = final.outputs[0].text, final.outputs[0].token_ids
    assert len(token_ids) == 24
    assert text
    deltas = outputs[RequestOutputKind.DELTA]
    assert "".join(o.outputs[0].text for o in deltas) == text
    assert [i for o in deltas for i in o.outputs[0].token_ids] == token_ids
    cumulative = outputs[RequestOutputKind.CUMULATIVE]
    assert cumulative[-1].outputs[0].text == text
    assert cumulative[-1].outputs[0].token_ids == token_ids
    for before, after in itertools.pairwise(cumulative):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
        assert after.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
    for several in outputs.values():
        assert [o.finished for o in several] == [False] * (len(several) - 1) + [True]
        assert [o.outputs[0].finish_reason for o in several][-1] == "length"
        assert all(o.outputs[0].finish_reason is None for o in several[:-1])


async def test_an_output_says_what_it_is_of(llm: AsyncLLM) -> None:
    output = await llm.complete(PROMPT, short(), request_id="mine")
    assert output.request_id == "mine"
    assert output.prompt == PROMPT
    by_ids = await llm.complete(output.prompt_token_ids, short())
    assert by_ids.prompt is None
    assert by_ids.prompt_token_ids == output.prompt_token_ids
    assert by_ids.outputs[0].token_ids == output.outputs[0].token_ids
    for same in ({"prompt": PROMPT}, {"prompt_token_ids": output.prompt_token_ids}, np.array(output.prompt_token_ids)):
        assert (await llm.complete(same, short())).outputs[0].token_ids == output.outputs[0].token_ids


async def test_stream_gives_the_text_of_complete(any_llm: AsyncLLM) -> None:
    pieces = [piece async for piece in any_llm.stream(PROMPT, short(20))]
    assert all(pieces)
    assert "".join(pieces) == (await any_llm.complete(PROMPT, short(20))).outputs[0].text


async def test_a_seed_fixes_the_text_in_any_company_and_topology(llm: AsyncLLM, any_llm: AsyncLLM) -> None:
    alone = (await llm.complete(PROMPT, short(16))).outputs[0]
    texts: dict[int, list[str]] = {1: [], 2: []}

    async def one(seed: int) -> None:
        texts[seed].append((await any_llm.complete(PROMPT, short(16, seed=seed))).outputs[0].text)

    async with anyio.create_task_group() as tasks:
        for seed in (1, 2, 1, 2):
            tasks.start_soon(one, seed)
    assert texts[1] == [alone.text] * 2
    assert texts[2][0] == texts[2][1] != alone.text


async def test_without_a_seed_requests_differ_and_greedy_ones_do_not(llm: AsyncLLM) -> None:
    drawn = {(await llm.complete(PROMPT, short(12, seed=None))).outputs[0].text for _ in range(3)}
    assert len(drawn) == 3
    greedy = {(await llm.complete(PROMPT, short(12, seed=seed, temperature=0))).outputs[0].text for seed in (1, 2)}
    assert len(greedy) == 1


async def test_many_streams_at_once_all_end_with_all_their_tokens(any_llm: AsyncLLM) -> None:
    counts: dict[int, int] = {}

    async def one(number: int) -> None:
        params = short(2 + number % 7, output_kind=RequestOutputKind.DELTA, seed=number)
        counts[number] = sum([len(o.outputs[0].token_ids) async for o in any_llm.generate(PROMPT, params)])

    async with anyio.create_task_group() as tasks:
        for number in range(100):  # more than max_num_seqs: some wait
            tasks.start_soon(one, number)
    assert counts == {number: 2 + number % 7 for number in range(100)}
    await becomes_idle(any_llm)


async def test_a_slow_consumer_gets_everything_in_fewer_outputs(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPT, short(40, output_kind=RequestOutputKind.DELTA))
    first = await first_of(stream)
    await becomes_idle(llm)
    (rest,) = await outputs_of(stream)
    whole = await llm.complete(PROMPT, short(40))
    assert first.outputs[0].token_ids + rest.outputs[0].token_ids == whole.outputs[0].token_ids
    assert first.outputs[0].text + rest.outputs[0].text == whole.outputs[0].text


async def test_the_caller_may_change_what_he_gave(llm: AsyncLLM) -> None:
    expected = await llm.complete(PROMPT, short(4))
    ids, params = expected.prompt_token_ids.copy(), short(4)
    stream = llm.generate(ids, params)
    ids[:] = [1]
    params.max_tokens = 9
    (*_, output) = await outputs_of(stream)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


async def test_metrics_are_epoch_seconds_in_order(any_llm: AsyncLLM) -> None:
    before = time.time()
    *_, output = await outputs_of(any_llm.generate(PROMPT, short(5)))
    after = time.time()
    metrics = output.metrics
    assert metrics is not None
    times = [
        metrics.arrival_time,
        metrics.queued_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        metrics.finished_time,
    ]
    known = [t for t in times if t is not None]
    assert len(known) == 6
    assert known == sorted(known)
    assert before - 1 < known[0] <= known[-1] < after + 1
    assert metrics.time_to_first_token == pytest.approx(known[3] - known[0])
    assert metrics.num_preemptions == metrics.num_cached_tokens == 0


# Early ends -----------------------------------------------------------------------------------------------------------


@on_every_backend
async def test_breaking_out_frees_the_blocks(any_llm: AsyncLLM) -> None:
    async with is_cut_short(any_llm):
        async for _ in any_llm.generate(PROMPT, endless()):
            break
    async with is_cut_short(any_llm):
        async for _ in any_llm.stream(PROMPT, endless()):
            break


@on_every_backend
async def test_cancelling_the_task_frees_the_blocks(any_llm: AsyncLLM) -> None:
    has_started = anyio.Event()

    async def consume() -> None:
        async for _ in any_llm.generate(PROMPT, endless()):
            has_started.set()

    async with is_cut_short(any_llm), anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await has_started.wait()
        tasks.cancel_scope.cancel()


async def test_cancelling_complete_frees_the_blocks(llm: AsyncLLM) -> None:
    async def is_running() -> bool:
        return bool((await llm.stats())["scheduler"]["scheduler"]["num_running"])

    async with is_cut_short(llm), anyio.create_task_group() as tasks:
        tasks.start_soon(llm.complete, PROMPT, endless())
        await until(is_running)
        tasks.cancel_scope.cancel()


async def test_a_timeout_frees_the_blocks(llm: AsyncLLM) -> None:
    async with is_cut_short(llm):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.complete(PROMPT, endless()), 0.1)


async def test_losing_the_last_reference_frees_the_blocks(any_llm: AsyncLLM) -> None:
    async with is_cut_short(any_llm):
        stream = any_llm.generate(PROMPT, endless())
        await first_of(stream)
        del stream
        gc.collect()
    async with is_cut_short(any_llm):
        any_llm.generate(PROMPT, endless())  # never looked at


@on_every_backend
async def test_aclose_and_async_with_end_the_stream(any_llm: AsyncLLM) -> None:
    async with is_cut_short(any_llm):
        async with any_llm.generate(PROMPT, endless()) as stream:
            await first_of(stream)
        assert await outputs_of(stream) == []
    async with is_cut_short(any_llm):
        text = any_llm.stream(PROMPT, endless())
        await text.__anext__()
        await text.aclose()
        await text.aclose()
        assert [piece async for piece in text] == []


# Abort ----------------------------------------------------------------------------------------------------------------


@on_every_backend
async def test_abort_delivers_what_there_is(any_llm: AsyncLLM) -> None:
    whole = await any_llm.complete(PROMPT, short(60))
    for kind in RequestOutputKind:
        stream = any_llm.generate(PROMPT, endless(output_kind=kind), request_id="x")
        outputs = [] if kind is RequestOutputKind.FINAL_ONLY else [await first_of(stream)]
        await any_llm.abort("x")
        outputs += await outputs_of(stream)
        final = outputs[-1]
        assert final.finished
        assert final.outputs[0].finish_reason == "abort"
        token_ids = [i for o in outputs for i in o.outputs[0].token_ids]
        if kind is not RequestOutputKind.DELTA:
            token_ids = final.outputs[0].token_ids
        if kind is not RequestOutputKind.FINAL_ONLY:
            assert token_ids
        num_comparable = min(len(token_ids), 60)
        assert token_ids[:num_comparable] == whole.outputs[0].token_ids[:num_comparable]
    await becomes_idle(any_llm)


async def test_abort_before_the_first_output_is_taken(any_llm: AsyncLLM) -> None:
    """On a busy machine a token may be faster than the abort."""
    stream = any_llm.generate(PROMPT, endless(), request_id="x")
    await any_llm.abort(["x", "never heard of"])
    *_, output = await outputs_of(stream)
    assert output.outputs[0].finish_reason == "abort"
    await becomes_idle(any_llm)


async def test_abort_of_what_waits_for_a_place(llm: AsyncLLM) -> None:
    streams = [llm.generate(PROMPT, endless(), request_id=str(i)) for i in range(70)]
    await first_of(streams[0])
    await llm.abort("69")
    (output,) = await outputs_of(streams[69])
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == []
    assert output.metrics is not None
    assert output.metrics.first_scheduled_time is None
    await llm.abort(str(i) for i in range(69))
    for stream in streams[:69]:
        *_, output = await outputs_of(stream)
        assert output.outputs[0].finish_reason == "abort"
    await becomes_idle(llm)


async def test_abort_races_with_the_end(any_llm: AsyncLLM) -> None:
    expected = (await any_llm.complete(PROMPT, short(3))).outputs[0].token_ids
    reasons = set()
    for number in range(12):
        stream = any_llm.generate(PROMPT, short(3), request_id="x")
        outputs = [await first_of(stream) for _ in range(1 if number % 2 else 0)]
        await anyio.sleep(0.002 * (number % 4))
        await any_llm.abort("x")
        outputs += await outputs_of(stream)
        final = outputs[-1].outputs[0]
        reasons.add(final.finish_reason)
        assert final.finish_reason in ("abort", "length")
        assert final.token_ids == expected[: len(final.token_ids)]
        if final.finish_reason == "length":
            assert len(final.token_ids) == 3
        await any_llm.abort("x")  # it has ended: nothing happens
    assert reasons
    await becomes_idle(any_llm)


async def test_a_request_id_is_free_again_when_its_request_has_ended(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPT, endless(), request_id="x")
    await first_of(stream)
    with pytest.raises(DuplicateRequestError, match="'x' is still running"):
        llm.generate(PROMPT, short(), request_id="x")
    await llm.abort("x")
    await outputs_of(stream)
    assert (await llm.complete(PROMPT, short(), request_id="x")).request_id == "x"
    dropped = llm.generate(PROMPT, endless(), request_id="y")
    await dropped.aclose()
    assert (await llm.complete(PROMPT, short(), request_id="y")).outputs[0].finish_reason == "length"
    await becomes_idle(llm)


# Hosts ----------------------------------------------------------------------------------------------------------------


@on_every_backend
async def test_every_async_library_is_a_host(any_llm: AsyncLLM) -> None:
    texts: list[str] = []

    async def one() -> None:
        texts.append("".join([piece async for piece in any_llm.stream(PROMPT, short(10))]))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(one)
    assert len(set(texts)) == 1
    assert len(texts) == 3


def test_one_engine_serves_one_loop_after_the_other(any_llm: AsyncLLM) -> None:
    async def main() -> str:
        return (await any_llm.complete(PROMPT, short(6))).outputs[0].text

    texts = [asyncio.run(main()), asyncio.run(main()), anyio.run(main, backend="trio")]
    assert len(set(texts)) == 1


def test_a_closed_loop_takes_its_open_streams_with_it(any_llm: AsyncLLM) -> None:
    kept: list[RequestStream] = []

    async def leave_open() -> None:
        kept.append(any_llm.generate(PROMPT, endless()))
        await first_of(kept[0])

    async def main() -> None:
        async with is_cut_short(any_llm):
            await anyio.to_thread.run_sync(asyncio.run, leave_open())

    anyio.run(main)


def test_two_loops_at_once(any_llm: AsyncLLM) -> None:
    texts: list[str] = []
    both = threading.Barrier(2, timeout=30)

    async def main() -> None:
        async with any_llm.generate(PROMPT, short(12)) as stream:
            await first_of(stream)
            both.wait()  # each in the middle of its stream
            *_, last = await outputs_of(stream)
            texts.append(last.outputs[0].text)

    threads = [threading.Thread(target=anyio.run, args=(main,), kwargs={"backend": b}) for b in ("asyncio", "trio")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_a_stream_may_be_made_outside_of_a_loop(any_llm: AsyncLLM) -> None:
    stream = any_llm.generate(PROMPT, short(6))
    *_, last = asyncio.run(outputs_of(stream))
    assert len(last.outputs[0].token_ids) == 6


async def test_many_tasks_may_share_nothing_but_the_engine(llm: AsyncLLM) -> None:
    """Streams inside of streams: no scope is held across a yield."""

    async def nested() -> AsyncIterator[str]:
        async for outer in llm.stream(PROMPT, short(3)):
            async for inner in llm.stream(PROMPT, short(3, seed=2)):
                yield outer + inner

    assert len([piece async for piece in nested()]) >= 2


async def test_tokenizing_a_long_prompt_leaves_the_loop_free(llm: AsyncLLM) -> None:
    """The loop turns while the prompt is worked on, and a stream that runs goes on."""
    num_turns = num_outputs = 0
    is_over = anyio.Event()

    async def turn() -> None:
        nonlocal num_turns
        while not is_over.is_set():
            await anyio.sleep(0.001)
            num_turns += 1

    async def consume(stream: RequestStream) -> None:
        nonlocal num_outputs
        async for _ in stream:
            num_outputs += 1
            if is_over.is_set():
                break

    async with anyio.create_task_group() as tasks:
        running = llm.generate(PROMPT, endless())
        await first_of(running)
        tasks.start_soon(consume, running)
        tasks.start_soon(turn)
        long = llm.generate("once upon a time there was " * 40_000, short(truncate_prompt_tokens=8))
        num_turns = num_outputs = 0
        await first_of(long)
        is_over.set()
        assert num_turns >= 10
        assert num_outputs >= 3
    await becomes_idle(llm)


async def test_statistics_start_nothing() -> None:
    llm = AsyncLLM("storyteller", num_threads=1)
    stats = await llm.stats()
    assert (stats["num_requests"], stats["scheduler"], stats["workers"]) == (0, None, None)
    assert llm._engine.pids == {}
    assert not llm._engine._thread.is_alive
    llm.shutdown()
    with pytest.raises(EngineShutdownError):
        await llm.stats()


async def test_the_consumer_of_the_whole_is_woken_once(llm: AsyncLLM) -> None:
    num_waits = 0
    stream = llm.generate(PROMPT, short(20, output_kind=RequestOutputKind.FINAL_ONLY))
    take = stream.take

    def counting() -> RequestOutput | None:
        nonlocal num_waits
        num_waits += 1
        return take()

    stream.take = counting  # type: ignore[method-assign]
    (output,) = await outputs_of(stream)
    assert len(output.outputs[0].token_ids) == 20
    assert num_waits <= 4, "before and after it makes its waiter, at the end, and for the end of the loop"


async def test_statistics_count_what_happened(any_llm: AsyncLLM) -> None:
    before = await any_llm.stats()
    await any_llm.complete(PROMPT, short(7))
    await becomes_idle(any_llm)
    after = await any_llm.stats()
    assert after["num_requests"] == before["num_requests"] + 1
    assert after["frontend"]["num_finished"] == before["frontend"]["num_finished"] + 1
    counted = [s["scheduler"]["scheduler"]["num_output_tokens"] for s in (before, after)]
    assert counted[1] - counted[0] == 7
    assert after["workers"][0]["num_steps"] > before["workers"][0]["num_steps"]
    assert any_llm.config.cache.num_blocks == after["scheduler"]["scheduler"]["kv"]["num_blocks"]
