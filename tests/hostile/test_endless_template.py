"""Embedding and HTTP: a chat template that loops for ever, brought by a request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import InvalidPromptError
from actorllm.server.app import create_app
from tests.hostile.bystander import bystander
from tests.hostile.prompts import ENDLESS_TEMPLATE

MESSAGES = [{"role": "user", "content": "One day"}]


async def test_it_is_ended_and_the_next_template_is_rendered() -> None:
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1, intake_timeout_s=1.5) as llm,
        bystander(llm) as steady,
    ):
        stream = llm.chat(MESSAGES, chat_template=ENDLESS_TEMPLATE)
        assert await steady.tokens_until_first() < 100
        with pytest.raises(InvalidPromptError, match=r"took more than intake_timeout_s=1.5 s"):
            async for _ in stream:
                pass
        app = create_app(llm, trust_request_chat_template=True)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json=body | {"chat_template": ENDLESS_TEMPLATE})
            assert answer.status_code == 400
            assert "intake_timeout_s" in answer.json()["error"]["message"]
            body = {"messages": MESSAGES, "chat_template": ENDLESS_TEMPLATE}
            answer = await client.post("/tokenize", json=body)
            assert answer.status_code == 400
            assert "intake_timeout_s" in answer.json()["error"]["message"]
            assert (await client.get("/health")).status_code == 200
        nested: Any = 1
        for _ in range(5000):
            nested = [nested]
        with pytest.raises(InvalidPromptError, match="nested too deeply"):
            await llm.chat(MESSAGES, chat_template=ENDLESS_TEMPLATE, chat_template_kwargs={"x": nested}).__anext__()
        output = await llm.chat(
            MESSAGES, SamplingParams(max_tokens=1), chat_template="{{ messages[0]['content'] }} {{ 1 + 1 }}"
        ).__anext__()
        assert output.prompt == "One day 2"
        stats = (await llm.stats())["intake"]
        assert stats["num_processes_killed"] == 3
        assert stats["num_stuck"] == 0


async def test_a_template_that_fills_the_memory_is_ended() -> None:
    template = (
        "{% set a = namespace(x='x' * 1000000) %}{% for i in range(99999) %}{% set a.x = a.x + a.x %}{% endfor %}"
    )
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm, bystander(llm):
        with pytest.raises(
            InvalidPromptError,
            match=r"more memory than it may|cannot be read|cannot render|process that read|took more than",
        ):
            await llm.chat(MESSAGES, chat_template=template).__anext__()
