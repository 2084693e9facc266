"""More than the engine can take, and an engine that takes no more: statuses that tell a client to come back."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.server.conftest import client_of, until

pytestmark = pytest.mark.anyio

TEXT = "/v1/completions"
LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}


def told_to_come_back(response: httpx.Response, status: int) -> bool:
    return (
        response.status_code == status
        and response.headers["retry-after"] == "1"
        and response.json()["error"]["code"] == status
    )


async def test_an_overloaded_engine_and_one_that_drains() -> None:
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=1, max_waiting_requests=1)
    await llm.start()
    try:
        async with client_of(create_app(llm)) as client, anyio.create_task_group() as group:
            answers: list[httpx.Response] = []

            async def ask(**fields: Any) -> None:
                answers.append(await client.post(TEXT, json={**LONG, **fields}))

            for _ in range(2):
                group.start_soon(ask)

            async def is_full() -> bool:
                scheduler = (await llm.stats())["scheduler"]["scheduler"]
                return bool(scheduler["num_running"] == scheduler["num_waiting"] == 1)

            await until(is_full, 40)
            for stream in (False, True):
                response = await client.post(TEXT, json={**LONG, "stream": stream})
                assert told_to_come_back(response, 429)
                assert response.json()["error"]["type"] == "RateLimitError"
            drained = []

            async def drain() -> None:
                drained.append(await llm.drain())

            group.start_soon(drain)
            await anyio.wait_all_tasks_blocked()
            for stream in (False, True):
                assert told_to_come_back(await client.post(TEXT, json={**LONG, "stream": stream}), 503)
            await client.post("/abort_requests", json={"abort_all": True})
        assert [answer.json()["choices"][0]["finish_reason"] for answer in answers] == ["abort", "abort"]
        assert drained == [True]
    finally:
        llm.shutdown()
