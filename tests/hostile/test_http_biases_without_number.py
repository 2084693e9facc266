"""`logit_bias` with 600,000 keys: refused by their number, and the loop goes on."""

from __future__ import annotations

import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import LEAST, beside, llm, parse_processes_end, refused  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_biases_without_number(llm: AsyncLLM) -> None:  # noqa: F811
    biases = b",".join(b'"%d":1' % number for number in range(600_000))
    async with beside(llm) as one:
        response, num_small = await one.attack(b'{"prompt":"a","logit_bias":{%b}}' % biases)
    refused(response, "logit_bias", "600000 items", "limit is 4096")
    assert num_small >= LEAST
