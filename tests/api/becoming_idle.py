"""An engine that has nothing to do any more, and all of its memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from actorllm import AsyncLLM


async def becomes_idle(llm: AsyncLLM) -> None:
    async def is_idle() -> bool:
        stats = await llm.stats()
        scheduler = stats["scheduler"]["scheduler"]
        return stats["frontend"]["num_requests"] == 0 and scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"]

    await until(is_idle)


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(20):
        while not await is_true():
            await anyio.sleep(0.005)
