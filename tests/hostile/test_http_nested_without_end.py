"""A body that is nested 100,000 deep, and one with millions of empty lists: refused, and the loop goes on."""

from __future__ import annotations

import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import LEAST, beside, llm, parse_processes_end, refused  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_nested_without_end(llm: AsyncLLM) -> None:  # noqa: F811
    async with beside(llm) as one:
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
            response, _ = await one.attack(b'{"prompt":' + opening * 100_000 + b"1" + closing * 100_000 + b"}")
            refused(response, None, "not valid JSON")
        response, num_small = await one.attack(b'{"tools":[' + b"[]," * 2_600_000 + b"[]]}", "/v1/chat/completions")
    refused(response, "tools", "2600001 items")
    assert num_small >= LEAST
