"""Embedding: a deadline that passes while a long text is tokenized ends the request, and the work for it."""

from __future__ import annotations

import anyio

from actorllm import AsyncLLM
from tests.hostile.bystander import bystander
from tests.hostile.prompts import ENDLESS_TEMPLATE, LONG, TO_THE_ROOM


async def test_the_work_ends_with_the_deadline() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm, bystander(llm) as steady:
        long = llm.generate(LONG, tokenization_kwargs=TO_THE_ROOM, timeout=0.2)
        endless = llm.chat([{"role": "user", "content": "x"}], chat_template=ENDLESS_TEMPLATE, timeout=0.2)
        for stream in (long, endless):
            (output,) = [output async for output in stream]
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].stop_reason == "deadline"
        assert await steady.tokens_until_first() < 100
        with anyio.fail_after(60):  # nothing goes on for them
            while (await llm.stats())["intake"]["num_busy"]:
                await steady.wait(1)
        stats = (await llm.stats())["intake"]
        assert stats["num_dropped"] == 2
        assert stats["num_timed_out"] == 0
