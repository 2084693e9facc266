"""n sequences that each show the prompt again: a short body asks for an answer of gigabytes, or of minutes of writing."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from actorllm import AsyncLLM
from tests.hostile.small_requests import LEAST, beside, llm, parse_processes_end, refused  # noqa: F401

pytestmark = pytest.mark.anyio

TEXT = "Once upon a time there was a little girl. " * 30
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": TEXT}]
MANY = {"n": 16384, "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": TEXT, "echo": True}, "echo"),
        ("/v1/completions", {"prompt": TEXT, "echo": True, "stream": True}, "echo"),
        ("/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 20, "n": 200}, "echo"),
        ("/v1/completions", {"prompt": TEXT, "prompt_logprobs": 20, "n": 200}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5] * 900, "return_token_ids": True}, "return_token_ids"),
        ("/v1/completions", {"prompt": [[5] * 900] * 160, "echo": True, "n": 100}, "echo"),
        ("/v1/chat/completions", {"messages": TALK, "echo": True}, "echo"),
        ("/v1/chat/completions", {"messages": TALK, "return_token_ids": True, "stream": True}, "return_token_ids"),
        ("/generate", {"prompt": TEXT}, "n"),
        ("/generate", {"prompt": "Once", "stream": True, "max_tokens": 1000}, "n"),
        ("/generate", {"prompt": "Once", "stream": True, "max_tokens": None}, "n"),
        ("/generate", {"prompt": "Once", "stream": True, "max_tokens": 10**18}, "n"),
    ],
)
async def test_too_many_copies(llm: AsyncLLM, path: str, body: dict[str, Any], param: str) -> None:  # noqa: F811
    async with beside(llm) as one:
        response, _ = await one.attack(orjson.dumps({**MANY, **body}), path)
    refused(response, param, "copies", "limit is 4194304")


@pytest.mark.parametrize("stream", [False, True])
async def test_as_many_copies_as_are_taken(llm: AsyncLLM, stream: bool) -> None:  # noqa: F811
    """They are written beside the loop, and the log-probabilities of the prompt once for all of them."""
    body = {"prompt": TEXT, "echo": True, "logprobs": 5, "n": 140, "max_tokens": 1, "stream": stream}
    async with beside(llm) as one:
        response, num_small = await one.attack(orjson.dumps(body))
        events = [line[6:] for line in response.content.split(b"\n") if line.startswith(b"data: {")]
    assert response.status_code == 200
    assert num_small >= LEAST
    found: dict[int, list[Any]] = {}
    for tree in map(orjson.loads, events if stream else [response.content]):
        for choice in tree["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    assert len(found) == 140
    for choices in found.values():
        text = "".join(choice["text"] for choice in choices)
        columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        offsets = [offset for column in columns for offset in column["text_offset"]]
        tokens = [token for column in columns for token in column["tokens"]]
        assert text.startswith(TEXT)
        assert [text[offset:].startswith(token) for offset, token in zip(offsets[1:], tokens[1:], strict=True)]


async def test_streams_of_a_request_begin_in_portions(llm: AsyncLLM) -> None:  # noqa: F811
    body = {"prompt": [[5, 6]] * 1000, "max_tokens": 1, "stream": True}
    async with beside(llm) as one:
        response, num_small = await one.attack(orjson.dumps(body))
    assert response.content.count(b'"finish_reason":"length"') == 1000
    assert num_small >= 1000 // 16
