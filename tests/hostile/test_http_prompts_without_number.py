"""1.2 million prompts in one body, and as many as are legal: the loop goes on."""

from __future__ import annotations

import orjson
import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import LEAST, beside, llm, parse_processes_end, refused  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_prompts_without_number(llm: AsyncLLM) -> None:  # noqa: F811
    async with beside(llm) as one:
        response, num_small = await one.attack(b'{"prompt":[' + b'"ab",' * 1_199_999 + b'"ab"]}')
    refused(response, "prompt", "1200000 items", "limit is 16384", "send fewer")
    assert num_small >= LEAST


async def test_as_many_prompts_as_are_taken(llm: AsyncLLM) -> None:  # noqa: F811
    """The requests to the engine are begun in portions."""
    async with beside(llm) as one:
        response, num_small = await one.attack(orjson.dumps({"prompt": [[5, 6]] * 300, "max_tokens": 1}))
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 300
    assert num_small >= LEAST
