"""pydantic-ai: text, streamed text, and typed output, which is a tool that must be called."""

from __future__ import annotations

from typing import Literal

from checks import MODEL, TEXT, URL, check, needs_tools, run
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


@check
def text() -> None:
    answer = Agent(model, model_settings={"max_tokens": 16, "seed": 1}).run_sync(TEXT)
    assert answer.output


@check
async def streamed() -> None:
    async with Agent(model, model_settings={"max_tokens": 16}).run_stream(TEXT) as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True)]
    assert "".join(pieces)


@check
def typed() -> None:
    needs_tools()

    class Answer(BaseModel):
        city: Literal["Berlin", "Paris"]
        is_warm: bool

    answer = Agent(model, output_type=Answer, model_settings={"max_tokens": 300}).run_sync(TEXT)
    assert isinstance(answer.output, Answer)


run("pydantic-ai-slim", "openai")
