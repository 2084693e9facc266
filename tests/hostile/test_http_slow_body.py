"""A body of separators that arrives piece by piece: nothing is looked at before it is whole, and it need not become so."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import LEAST, beside, llm, parse_processes_end, refused  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_a_body_that_arrives_slowly(llm: AsyncLLM) -> None:  # noqa: F811
    async with beside(llm) as one:

        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"prompt":["a"'
            for _ in range(20):
                yield b',"a"' * 50_000
                await one.steady.wait(1)
            yield b"]}"

        response, num_small = await one.attack(slowly())
    refused(response, "prompt", "1000001 items")
    assert num_small >= 20


async def test_a_body_that_never_becomes_whole(llm: AsyncLLM) -> None:  # noqa: F811
    async def forever() -> AsyncIterator[bytes]:
        while True:
            yield b'{"a":[[[' * 100
            await anyio.sleep(0.01)

    async with beside(llm, body_timeout_s=0.3) as one:
        response, num_small = await one.attack(forever())
    assert response.status_code == 408
    assert num_small >= LEAST
