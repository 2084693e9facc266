"""DSPy: its language model by LiteLLM: whole, asynchronous, with an answer by a schema, and with a tool that must be called."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy
from checks import MODEL, TEXT, URL, WEATHER, check, run


def model(max_tokens: int) -> dspy.LM:
    return dspy.LM(
        f"hosted_vllm/{MODEL}", api_base=f"{URL}/v1", api_key="none", max_tokens=max_tokens, cache=False, num_retries=0
    )


@check
def text() -> None:
    (answer,) = model(8)(TEXT)
    assert answer["text"] if isinstance(answer, dict) else answer


@check
def schema() -> None:
    form = {"name": "place", "schema": WEATHER["function"]["parameters"]}
    (answer,) = model(300)(TEXT, response_format={"type": "json_schema", "json_schema": form})
    assert set(json.loads(answer["text"] if isinstance(answer, dict) else answer)) == {"city", "days"}


@check
def tools() -> None:
    (answer,) = model(300)(TEXT, tools=[WEATHER], tool_choice="required")
    assert answer["tool_calls"][0].function.name == "weather"


@check
async def asynchronous() -> None:
    assert await model(8).acall(TEXT)


run("dspy", "litellm", "openai")
