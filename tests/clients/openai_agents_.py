"""openai-agents: an agent over chat completions and over responses, with a tool, in a stream, and with a typed answer."""

from __future__ import annotations

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, TEXT, URL, check, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
KINDS = ("chat", "responses")
CALL = {"tool_choice": "required", "parallel_tool_calls": False}
asked: list[str] = []


@function_tool
def weather(city: Literal["Berlin", "Paris"]) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


def agent(kind: str, max_tokens: int = 300, **more: object) -> Agent:
    stop = None if more else {"stop": ["."], "min_tokens": 8}
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    made = MODELS[KINDS.index(kind)](model=MODEL, openai_client=client)
    # The agent takes no answer over responses that a limit has cut: this model goes on for ever, so a word ends it.
    settings = ModelSettings(max_tokens=max_tokens, extra_body=stop, **more.pop("settings", {}))
    return Agent("teller", instructions="Tell.", model=made, model_settings=settings, **more)


@check
async def text() -> None:
    for kind in KINDS:
        assert (await Runner.run(agent(kind), TEXT)).final_output


@check
async def streamed() -> None:
    for kind in KINDS:
        told = Runner.run_streamed(agent(kind), TEXT)
        events = [event async for event in told.stream_events()]
        assert told.final_output
        assert sum(event.type == "raw_response_event" for event in events) > 5


@check
async def tools() -> None:
    for kind in KINDS:
        asked.clear()
        made = agent(kind, tools=[weather], tool_use_behavior="stop_on_first_tool", settings=CALL)
        assert (await Runner.run(made, TEXT)).final_output == "sunny"
        assert set(asked) <= {"Berlin", "Paris"}
        assert asked


@check
async def typed() -> None:
    class Answer(BaseModel):
        city: Literal["Berlin", "Paris"]
        is_warm: bool

    for kind in KINDS:
        assert isinstance((await Runner.run(agent(kind, output_type=Answer), TEXT)).final_output, Answer)


run("openai-agents", "openai")
