"""16 large bodies at once beside a client that streams: small requests and the stream go on, and every body is answered."""

from __future__ import annotations

import anyio
import httpx
import orjson
import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import LEAST, TEXT, beside, llm, parse_processes_end  # noqa: F401

pytestmark = pytest.mark.anyio

BODIES = (
    b'{"prompt":[' + b"[]," * 600_000 + b"[]]}",
    b'{"prompt":"a","logit_bias":{%b}}' % b",".join(b'"%d":1' % number for number in range(150_000)),
    orjson.dumps({"prompt": [5] * 300_000}),
    orjson.dumps({"messages": [{"role": "user", "content": "a, b: c"}] * 30_000}),
)


async def test_a_flood_of_bodies(llm: AsyncLLM) -> None:  # noqa: F811
    answers: list[httpx.Response] = []
    async with beside(llm) as one:

        async def ask(body: bytes) -> None:
            answers.append((await one.attack(body))[0])

        before = one.num_small
        async with anyio.create_task_group() as tasks:
            for body in BODIES * 4:
                tasks.start_soon(ask, body)
        num_small = one.num_small - before
        streamed = await one.client.post(TEXT, json={"prompt": "Once", "max_tokens": 5, "stream": True})
    assert [answer.status_code for answer in answers] == [400] * 16
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert num_small >= 16 * LEAST
