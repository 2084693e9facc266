"""A legal body that is large: its answer is that of the small one, token for token."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import TEXT, beside, llm, parse_processes_end  # noqa: F401

pytestmark = pytest.mark.anyio

IDS = [5 + number % 4000 for number in range(3000)]
ASKED: dict[str, dict[str, Any]] = {
    "token ids": {"prompt": IDS, "truncate_prompt_tokens": 900, "return_token_ids": True},
    "lists of token ids": {"prompt": [IDS[:500], [7], IDS[500:1400]], "echo": True, "return_token_ids": True},
    "text": {"prompt": "Once upon a time " * 200, "return_token_ids": True},
    "allowed ids": {"prompt": "Once", "allowed_token_ids": IDS[:2000]},
}


@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED)
async def test_a_large_body_is_answered_as_a_small_one(llm: AsyncLLM, fields: dict[str, Any]) -> None:  # noqa: F811
    asked = {**fields, "max_tokens": 8, "seed": 3, "temperature": 0.8}
    async with beside(llm) as one:
        small = await one.client.post(TEXT, json={**asked, "cache_salt": "small"})
        large, num_small = await one.attack(orjson.dumps({**asked, "cache_salt": "large", "user": "a" * (1 << 21)}))
    assert small.status_code == large.status_code == 200, large.text
    assert large.json()["choices"] == small.json()["choices"]
    assert large.json()["usage"] == small.json()["usage"]
    assert num_small
