"""litellm, with its provider for vLLM servers."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import MESSAGES, MODEL, TEXT, URL, check, run

ARGUMENTS = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "max_tokens": 8, "seed": 1, "num_retries": 0}


@check
def completion() -> None:
    answer = litellm.completion(messages=MESSAGES, **ARGUMENTS)
    assert answer.usage.completion_tokens == 8
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(messages=MESSAGES, stream=True, **ARGUMENTS)
    ]
    assert "".join(pieces) == answer.choices[0].message.content


@check
async def asynchronous() -> None:
    answer = await litellm.acompletion(messages=MESSAGES, **ARGUMENTS)
    assert answer.choices[0].message.content


@check
def text_completion() -> None:
    arguments = {**ARGUMENTS, "model": f"text-completion-openai/{MODEL}", "api_key": "none"}
    assert litellm.text_completion(prompt=TEXT, **arguments).choices[0].text


@check
def errors() -> None:
    try:
        litellm.completion(messages=MESSAGES, **{**ARGUMENTS, "temperature": -1.0})
    except litellm.BadRequestError:
        return
    raise AssertionError("no error")


run("litellm", "openai")
