"""`x-request-id` is set by proxies: whatever it is, the request is answered, under a name that is short and ends no line."""

from __future__ import annotations

import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import TEXT, beside, llm, parse_processes_end  # noqa: F401

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/v1/responses"])
async def test_names_of_requests(llm: AsyncLLM, path: str) -> None:  # noqa: F811
    body = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
    }.get(path, {"prompt": "a", "max_tokens": 1})
    told = {}
    async with beside(llm) as one:
        for name in (b"a" * 256, b"a" * 300, b"a" * 300 + b"b", b"a" * 100_000, b"a\x85b\x1b[2J", b"", b"\xff" * 400):
            response = await one.client.post(path, json=body, headers={b"x-request-id": name})
            assert response.status_code == 200, response.text
            told[name] = response.json()["id"].partition("-" if path != "/v1/responses" else "_")[2]
            assert response.headers["x-request-id"].isprintable()
        again = await one.client.post(path, json=body, headers={b"x-request-id": b"a" * 300})
    assert told[b"a" * 256] == "a" * 256
    assert all(len(name) <= 256 and name.isprintable() for name in told.values())
    assert told[b"a" * 300].startswith("a" * 200)
    assert told[b"a\x85b\x1b[2J"] == "a?b?[2J"
    assert len(set(told.values())) == len(told), "names that differ stay different"
    assert again.json()["id"].endswith(told[b"a" * 300]), "and each of them stays what it is"
