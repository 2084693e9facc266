"""Pausing an engine, as a program that changes weights does it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import InvalidParameterError

PROMPT = "Once upon a time there was a little fox who lived in a large and very dark wood with his mother"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def running(topology: str = "inline") -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM("storyteller", dtype="float32", topology=topology, num_threads=1, block_size=16, max_num_seqs=1)
    async with llm:
        yield llm


def params(num_tokens: int = 60) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.anyio
@pytest.mark.parametrize("topology", ["inline", "process"])
async def test_every_mode(topology: str) -> None:
    async with running(topology) as llm:
        expected = (await llm.complete(PROMPT, params())).outputs[0].token_ids
        assert not await llm.is_paused()

        stream = llm.generate(PROMPT, params(800))
        await anext(stream)
        await llm.pause_generation()
        assert await llm.is_paused()
        outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].finish_reason == "abort"
        later = llm.generate(PROMPT, params())
        await llm.resume_generation()
        final = [output async for output in later][-1]
        assert final.outputs[0].token_ids == expected
        assert final.num_cached_tokens == 0, "pausing forgets what is cached"

        first, second = llm.generate(PROMPT, params()), llm.generate(PROMPT, params())
        await anext(first)
        await llm.pause_generation(mode="wait", clear_cache=False)
        done = [output async for output in first][-1]
        assert done.outputs[0].token_ids == expected
        await llm.resume_generation()
        final = [output async for output in second][-1]
        assert final.outputs[0].token_ids == expected
        assert final.num_cached_tokens > 0

        stream = llm.generate(PROMPT, params(200))
        await anext(stream)
        await llm.pause_generation(mode="keep")
        taken = stream.take()
        assert stream.take() is None
        assert taken is None or not taken.finished
        statistics = (await llm.stats())["scheduler"]["scheduler"]
        assert statistics["pause_state"] == "nothing"
        assert statistics["kv"]["num_free"] == statistics["kv"]["num_blocks"]
        await llm.resume_generation()
        final = [output async for output in stream][-1]
        assert final.outputs[0].token_ids[:60] == expected
        assert final.metrics is not None
        assert final.metrics.num_preemptions == 1


@pytest.mark.anyio
async def test_several_pauses_and_an_attached_frontend() -> None:
    """Whoever pauses pauses everybody; a second pause on top of the first is no second one to be taken back."""
    owner = AsyncLLM("storyteller", name="paused", dtype="float32", num_threads=1, max_num_seqs=2)
    async with owner:
        expected = (await owner.complete(PROMPT, params(20))).outputs[0].token_ids
        guest = AsyncLLM.attach("paused")
        async with guest:
            running = owner.generate(PROMPT, params(150))
            await anext(running)
            await guest.pause_generation(mode="keep", clear_cache=False)
            assert await owner.is_paused()
            waiting = [owner.generate(PROMPT, params(20)), guest.generate(PROMPT, params(20))]
            await owner.pause_generation(mode="keep")
            assert [stream.take() for stream in waiting] == [None, None]
            await guest.resume_generation()
            assert not await owner.is_paused()
            for stream in waiting:
                assert [output async for output in stream][-1].outputs[0].token_ids == expected
            assert [output async for output in running][-1].outputs[0].token_ids[:20] == expected


@pytest.mark.anyio
async def test_resuming_ends_a_pause_that_still_waits() -> None:
    async with running() as llm:
        stream = llm.generate(PROMPT, params(800))
        await anext(stream)
        async with anyio.create_task_group() as group:

            async def pause() -> None:
                await llm.pause_generation(mode="wait")

            group.start_soon(pause)
            while not await llm.is_paused():
                await anyio.lowlevel.checkpoint()
            await llm.resume_generation()
        assert not await llm.is_paused()
        await stream.aclose()


@pytest.mark.anyio
async def test_what_was_never_started_is_not_paused_and_bad_modes_are_named() -> None:
    llm = AsyncLLM("storyteller", topology="inline")
    assert not await llm.is_paused()
    await llm.resume_generation()
    assert await llm.reset_prefix_cache()
    with pytest.raises(InvalidParameterError, match=r"mode='wiat'.*did you mean 'wait'"):
        await llm.pause_generation(mode="wiat")  # type: ignore[arg-type]
    llm.shutdown()


@pytest.mark.anyio
async def test_a_pause_among_the_sequences_of_a_request() -> None:
    """One of them runs and the others wait: all end, or all are produced later."""
    several = SamplingParams(n=3, temperature=0.5, seed=1, max_tokens=30, ignore_eos=True)
    async with running() as llm:
        expected = [o.token_ids for o in (await llm.complete(PROMPT, several)).outputs]
        stream = llm.generate(PROMPT, several)
        await anext(stream)
        await llm.pause_generation()
        ends = {o.index: o.finish_reason for output in [o async for o in stream] for o in output.outputs}
        assert ends == dict.fromkeys(range(3), "abort")
        later = llm.generate(PROMPT, several)
        await llm.resume_generation()
        *_, last = [output async for output in later]
        assert last.finished
        again = llm.generate(PROMPT, several)
        await anext(again)
        await llm.pause_generation(mode="keep")
        await llm.resume_generation()
        tokens = {o.index: o.token_ids for output in [o async for o in again] for o in output.outputs}
        assert [tokens[index] for index in range(3)] == expected


@pytest.mark.anyio
async def test_what_is_asked_while_the_model_loads_waits_for_it() -> None:
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1)
    try:
        stream = llm.generate(PROMPT, params(4))  # which starts the engine
        assert not await llm.is_paused()
        assert await llm.reset_prefix_cache()
        await llm.resume_generation()
        await llm.wake_up()
        assert len([output async for output in stream][-1].outputs[0].token_ids) == 4
    finally:
        llm.shutdown()
