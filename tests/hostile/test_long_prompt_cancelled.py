"""Embedding: a text that takes seconds to tokenize, cancelled at once, beside small requests of the same program."""

from __future__ import annotations

from actorllm import AsyncLLM
from tests.hostile.bystander import bystander
from tests.hostile.prompts import LONG, TO_THE_ROOM


async def test_it_is_dropped_before_and_during_its_work() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm, bystander(llm) as steady:
        # before: it is aborted while it waits, and its last output is there at once
        streams = [llm.generate(LONG, tokenization_kwargs=TO_THE_ROOM) for _ in range(6)]
        for stream in reversed(streams):
            stream.abort()
        for stream in streams:
            assert [output.outputs[0].finish_reason async for output in stream] == ["abort"]
        assert await steady.tokens_until_first() < 100
        # during: the consumer leaves when the work has begun
        stream = llm.generate(LONG, tokenization_kwargs=TO_THE_ROOM)
        while not (await llm.stats())["intake"]["process_pids"]:
            await steady.wait(1)
        assert await steady.tokens_until_first() < 100
        stream.abort()
        assert [output.outputs[0].finish_reason async for output in stream] == ["abort"]
        stats = (await llm.stats())["intake"]
        assert stats["num_dropped"] == 7
        assert stats["num_waiting"] == 0
