"""More than an engine can take: who is refused, what slow consumers cost, and that neither harms anybody else."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from actorllm import LLM, AsyncLLM, EngineOverloaded, RequestOutput, RequestOutputKind, RequestStream, SamplingParams
from actorllm.actors.frontend import Delta
from actorllm.errors import ConfigError, InvalidParameterError, RequestError

PROMPT = "Once upon a time"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def endless(**arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, ignore_eos=True, seed=1, **arguments)


def short(num_tokens: int = 3, **arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, **arguments)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """Two run, three may wait."""
    engine = AsyncLLM(
        "storyteller",
        dtype="float32",
        topology="inline",
        num_threads=1,
        max_num_seqs=2,
        max_waiting_requests=3,
        max_waiting_tokens=200,
    )
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def scheduler_of(llm: AsyncLLM) -> dict[str, Any]:
    counts: dict[str, Any] = (await llm.stats())["scheduler"]["scheduler"]
    return counts


async def becomes_idle(llm: AsyncLLM) -> None:
    with anyio.fail_after(20):
        while (counts := await scheduler_of(llm))["num_running"] or counts["num_waiting"]:
            await anyio.sleep(0.005)


async def fill(llm: AsyncLLM) -> list[RequestStream]:
    """Two that run, three that wait."""
    streams = [llm.generate(PROMPT, endless()) for _ in range(2)]
    for stream in streams:
        await stream.__anext__()
    streams += [llm.generate(PROMPT, short()) for _ in range(3)]
    assert (await scheduler_of(llm))["num_waiting"] == 3
    return streams


async def tokens_of(stream: RequestStream) -> int:
    return sum([len(output.outputs[0].token_ids) async for output in stream])


# Bounded queues -------------------------------------------------------------------------------------------------------


async def test_one_too_many_is_refused_alone(llm: AsyncLLM) -> None:
    streams = await fill(llm)
    before = await scheduler_of(llm)
    with pytest.raises(EngineOverloaded, match=r"3 requests of at most 3 .* wait already") as caught:
        await llm.complete(PROMPT, short())
    error = caught.value
    assert isinstance(error, RequestError)
    assert (error.num_waiting_requests, error.max_waiting_requests, error.max_waiting_tokens) == (3, 3, 200)
    assert error.num_waiting_tokens == (await scheduler_of(llm))["num_waiting_tokens"] > 0
    assert (await scheduler_of(llm))["num_overloaded"] == before["num_overloaded"] + 1
    for stream in streams[:2]:
        assert not (await stream.__anext__()).finished
        await stream.aclose()
    for stream in streams[2:]:
        *_, output = [output async for output in stream]
        assert output.outputs[0].finish_reason == "length"
    assert (await llm.complete(PROMPT, short())).finished, "there is room again"


async def test_cancelling_one_that_waits_makes_room(llm: AsyncLLM) -> None:
    streams = await fill(llm)
    await streams.pop().aclose()
    replacement = llm.generate(PROMPT, short())
    for stream in streams[:2]:
        await stream.aclose()
    assert await tokens_of(replacement)
    for stream in streams:
        await stream.aclose()


async def test_a_request_of_several_sequences_is_taken_whole_or_not_at_all(llm: AsyncLLM) -> None:
    streams = await fill(llm)
    await streams.pop().aclose()
    await streams.pop().aclose()
    with pytest.raises(EngineOverloaded, match="this one has 3 sequences"):
        await llm.complete(PROMPT, short(n=3))
    assert (await scheduler_of(llm))["num_waiting"] == 1, "none of them stayed"
    pair = llm.generate(PROMPT, short(n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    for stream in streams:
        await stream.aclose()
    (output,) = [output async for output in pair]
    assert [len(o.token_ids) for o in output.outputs] == [3, 3]
    await becomes_idle(llm)


async def test_long_prompts_fill_the_queue_as_well(llm: AsyncLLM) -> None:
    running = [llm.generate(PROMPT, endless()) for _ in range(2)]
    for stream in running:
        await stream.__anext__()
    taken = llm.generate([5] * 300, short())  # more than the limit by itself, and nothing waits
    assert (await scheduler_of(llm))["num_waiting_tokens"] == 300
    with pytest.raises(EngineOverloaded, match="300 prompt tokens of at most 200") as caught:
        await llm.complete([5], short())
    assert caught.value.num_waiting_tokens == 300
    for stream in running:
        await stream.aclose()
    assert await tokens_of(taken)


async def test_what_never_fits_is_no_matter_of_load(llm: AsyncLLM) -> None:
    """Trying again later would not help."""
    with pytest.raises(
        InvalidParameterError, match=r"n=6 sequences are more than .* max_num_seqs=2 .* max_waiting_requests=3"
    ):
        llm.generate(PROMPT, short(n=6, temperature=1.0))


async def test_a_burst_is_refused_before_it_is_tokenized() -> None:
    """What has not reached the scheduler is bounded as well: here the engine is not even started."""
    burst = AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=2, max_waiting_requests=3)
    streams = [burst.generate(PROMPT, short()) for _ in range(5)]
    with pytest.raises(EngineOverloaded, match="5 requests of at most 5 are on their way"):
        burst.generate(PROMPT, short())
    for stream in streams:
        assert await tokens_of(stream)
    assert (await burst.complete(PROMPT, short())).finished
    burst.shutdown()


def test_concurrent_submissions_never_exceed_the_limits(llm: AsyncLLM) -> None:
    """Whatever the interleaving, everybody gets either all tokens or the error, and the refused come back."""
    num_done = num_refused = 0
    lock = threading.Lock()

    async def one(number: int) -> None:
        nonlocal num_done, num_refused
        while True:
            try:
                output = await llm.complete([5 + number], short())
            except EngineOverloaded:
                with lock:
                    num_refused += 1
                await anyio.sleep(0.001)
            else:
                assert len(output.outputs[0].token_ids) == 3
                with lock:
                    num_done += 1
                return

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(15):
                tasks.start_soon(one, number)

    threads = [threading.Thread(target=anyio.run, args=(main,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_done == 30
    assert num_refused > 0
    anyio.run(becomes_idle, llm)


@pytest.mark.parametrize("name", ["max_waiting_requests", "max_waiting_tokens", "max_waiting_attached"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_limits_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value!r} must be an integer of at least 0, or None"):
        AsyncLLM("storyteller", **{name: value})


@pytest.mark.parametrize(("name", "ours"), [("reqs", "max_waiting_requests"), ("tokens", "max_waiting_tokens")])
def test_the_limits_of_vllm_count_something_else(name: str, ours: str) -> None:
    with pytest.raises(
        ConfigError, match=f"max_num_queued_{name}=9 is not supported; leave it at None, and use {ours}"
    ):
        AsyncLLM("storyteller", **{f"max_num_queued_{name}": 9})


# A frontend that floods -----------------------------------------------------------------------------------------------


def test_an_attached_program_that_floods_is_refused_and_nobody_else() -> None:
    owner = LLM("storyteller", name="flooded", topology="inline", num_threads=1, max_num_seqs=2, max_waiting_attached=4)
    guest = AsyncLLM.attach("flooded")

    async def flood() -> list[BaseException | None]:
        streams = [guest.generate(PROMPT, endless()) for _ in range(30)]
        await streams[0].__anext__()

        async def end_of(stream: RequestStream) -> BaseException | None:
            try:
                await stream.__anext__()
            except EngineOverloaded as error:
                return error
            return None

        errors = [await end_of(stream) for stream in streams[10:]]
        outputs = await anyio.to_thread.run_sync(lambda: owner.enqueue([PROMPT] * 20, short(), use_tqdm=False))
        assert len(outputs) == 20
        for stream in streams:
            await stream.aclose()
        return errors

    errors = anyio.run(flood)
    assert all(isinstance(error, EngineOverloaded) and error.max_waiting_requests == 4 for error in errors)
    done = owner.wait_for_completion(use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in done] == [3] * 20
    guest.shutdown()
    owner.shutdown()


# Consumers that are slow ----------------------------------------------------------------------------------------------


def num_alive(kind: type) -> int:
    gc.collect()
    return sum(type(found) is kind for found in gc.get_objects())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_what_nobody_reads_is_kept_as_tokens_and_not_as_messages(
    llm: AsyncLLM, kind: RequestOutputKind, n: int
) -> None:
    params = short(200, output_kind=kind, n=n, temperature=0.5)
    num_outputs, num_deltas = num_alive(RequestOutput), num_alive(Delta)
    stream = llm.generate(PROMPT, params)
    with anyio.fail_after(30):
        while not stream.has_ended:
            await anyio.sleep(0.01)
    assert num_alive(RequestOutput) == num_outputs
    assert num_alive(Delta) - num_deltas <= (40 if kind is RequestOutputKind.DELTA else 5) * n, "200 were sent"
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    whole = await llm.complete(PROMPT, params)
    assert [o.token_ids for o in outputs[0].outputs] == [o.token_ids for o in whole.outputs]
    assert [o.text for o in outputs[0].outputs] == [o.text for o in whole.outputs]
    metrics = outputs[0].metrics
    assert metrics is not None
    assert metrics.first_token_ts < metrics.last_token_ts
    assert metrics.num_generation_tokens == 200 * n


async def test_a_slow_reader_loses_nothing_at_any_pace(llm: AsyncLLM) -> None:
    """It takes what is there while more of it comes, logprobs with it."""
    params = short(300, output_kind=RequestOutputKind.DELTA, logprobs=1)
    whole = (await llm.complete(PROMPT, params)).outputs[0]
    tokens, text, logprobs = [], "", []
    async for output in llm.generate(PROMPT, params):
        (part,) = output.outputs
        tokens += part.token_ids
        text += part.text
        logprobs += part.logprobs or []
        await anyio.sleep(0.002 * (len(tokens) % 5))
    assert (tokens, text) == (whole.token_ids, whole.text)
    assert whole.logprobs is not None
    assert [list(entry) for entry in logprobs] == [list(entry) for entry in whole.logprobs]


def test_a_blocked_loop_delays_nobody(llm: AsyncLLM) -> None:
    """One application's loop stands still until another's stream has gone through from start to end."""
    is_blocked, is_through = threading.Event(), threading.Event()
    counts: dict[str, list[int]] = {"blocked": [], "other": []}

    async def blocked() -> None:
        async for output in llm.generate(PROMPT, short(300, output_kind=RequestOutputKind.DELTA)):
            counts["blocked"].append(len(output.outputs[0].token_ids))
            if len(counts["blocked"]) == 1:
                is_blocked.set()
                assert is_through.wait(30)

    async def other() -> None:
        async for output in llm.generate(PROMPT, short(300, output_kind=RequestOutputKind.DELTA)):
            counts["other"].append(len(output.outputs[0].token_ids))
        is_through.set()

    thread = threading.Thread(target=asyncio.run, args=(blocked(),))
    thread.start()
    assert is_blocked.wait(30)
    asyncio.run(other())
    thread.join(30)
    assert sum(counts["other"]) == sum(counts["blocked"]) == 300
    assert len(counts["blocked"]) < 60 < len(counts["other"]), "what had come meanwhile came at once"
