"""HEAD is answered wherever GET is, without a body; what asks for no text gets that also from an engine under load."""

from __future__ import annotations

import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.hostile.small_requests import TEXT, beside, llm, parse_processes_end  # noqa: F401
from tests.server.conftest import client_of

pytestmark = pytest.mark.anyio

PATHS = ("/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/v1/models/storyteller", "/", "/live")


async def test_head(llm: AsyncLLM) -> None:  # noqa: F811
    async with beside(llm) as one:
        for path in (*PATHS, "/tokenizer_info", "/openapi.json"):
            asked, told = await one.client.get(path), await one.client.head(path)
            assert told.status_code == asked.status_code == 200, path
            assert told.content == b""
            assert told.headers["content-type" if path not in ("/health", "/ping") else "content-length"]
        assert (await one.client.head(TEXT)).status_code == 405
        missing = await one.client.head("/v1/models/other")
        assert (missing.status_code, missing.content) == (404, b"")
    async with client_of(create_app(llm, api_key="secret")) as client:
        assert (await client.head("/v1/models")).status_code == 401
        assert (await client.head("/health")).status_code == 200
