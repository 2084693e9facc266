"""Headers and addresses without end: refused before anything looks through them."""

from __future__ import annotations

import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import beside, llm, parse_processes_end  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_headers_without_number(llm: AsyncLLM) -> None:  # noqa: F811
    async with beside(llm) as one:
        many = await one.client.get("/version", headers=[(f"x-{number}", "a") for number in range(5000)])
        assert many.status_code == 431
        assert "headers, and the limit is 256" in many.json()["error"]["message"]
        for address in ("/version?" + "a=1&" * 10_000, "/" + "a" * 20_000):
            long = await one.client.get(address)
            assert long.status_code == 414
            assert "limit is 16384" in long.json()["error"]["message"]
        assert (await one.client.get("/version", headers=[("x-one", "a" * 100_000)])).status_code == 200
