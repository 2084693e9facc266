"""600,000 fields that nobody knows: refused by their number, and the loop goes on."""

from __future__ import annotations

import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import LEAST, beside, llm, parse_processes_end, refused  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_unknown_fields_without_number(llm: AsyncLLM) -> None:  # noqa: F811
    fields = b",".join(b'"x%d":0' % number for number in range(600_000))
    async with beside(llm) as one:
        response, num_small = await one.attack(b'{"prompt":"a",%b}' % fields)
    refused(response, None, "600001 fields", "limit is 1024")
    assert num_small >= LEAST
