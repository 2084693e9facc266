"""ollama: chats and prompts whole and streamed, tools, an answer by a schema, and the list of models."""

from __future__ import annotations

import json

import ollama
from checks import MESSAGES, MODEL, TEXT, URL, WEATHER, check, run

client = ollama.Client(host=URL)
FEW = {"num_predict": 8, "temperature": 0}
SCHEMA = WEATHER["function"]["parameters"]


@check
def chat() -> None:
    whole = client.chat(MODEL, MESSAGES, options=FEW)
    assert whole.message.content
    assert whole.eval_count == 8
    pieces = [part.message.content for part in client.chat(MODEL, MESSAGES, options=FEW, stream=True)]
    assert "".join(pieces) == whole.message.content


@check
def generate() -> None:
    whole = client.generate(MODEL, TEXT, raw=True, options=FEW)
    pieces = [part.response for part in client.generate(MODEL, TEXT, raw=True, options=FEW, stream=True)]
    assert "".join(pieces) == whole.response != ""


@check
def schema() -> None:
    answer = client.chat(MODEL, MESSAGES, format=SCHEMA, options={"num_predict": 300})
    assert set(json.loads(answer.message.content)) == {"city", "days"}


@check
def tools() -> None:
    answer = client.chat(MODEL, MESSAGES, tools=[WEATHER], options=FEW)
    assert answer.message.content or answer.message.tool_calls


@check
async def asynchronous() -> None:
    assert (await ollama.AsyncClient(host=URL).chat(MODEL, MESSAGES, options=FEW)).message.content


@check
def models() -> None:
    assert [model.model for model in client.list().models] == [f"{MODEL}:latest"]


@check
def errors() -> None:
    try:
        client.chat("another", MESSAGES)
    except ollama.ResponseError as error:
        assert error.status_code == 404
    else:
        raise AssertionError("no error")


run("ollama")
