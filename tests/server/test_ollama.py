"""Ollama's API, as its clients use it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import orjson
import pytest

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
OPTIONS = {"num_predict": 12, "temperature": 0}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"at": {"enum": ["home", "sea"]}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of the answer."""
    body = {"model": "storyteller", "options": OPTIONS, **fields}
    response = await client.post(f"/api/{path}", json=body)
    assert response.status_code == 200, response.text
    if fields.get("stream") is False:
        assert response.headers["content-type"] == "application/json"
        return [response.json()]
    assert response.headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(line) for line in response.text.splitlines()]


async def test_a_chat_is_that_of_the_other_api(client: httpx.AsyncClient) -> None:
    (whole,) = await ask(client, "chat", messages=MESSAGES, stream=False)
    as_chat = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    chat = (await client.post("/v1/chat/completions", json=as_chat)).json()
    text = chat["choices"][0]["message"]["content"]
    assert whole["message"] == {"role": "assistant", "content": text}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("storyteller", True, "length")
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (chat["usage"]["prompt_tokens"], 12)
    assert whole["total_duration"] >= whole["eval_duration"] > 0
    assert whole["total_duration"] >= whole["prompt_eval_duration"] > 0
    *lines, last = await ask(client, "chat", messages=MESSAGES)
    assert len(lines) > 3
    assert "".join(line["message"]["content"] for line in lines) == text
    assert not any(line["done"] for line in lines)
    assert (last["done"], last["message"]["content"], last["eval_count"]) == (True, "", 12)
    (tagged,) = await ask(client, "chat", model="storyteller:latest", messages=MESSAGES, stream=False)
    assert tagged["model"] == "storyteller:latest"


async def test_a_prompt_goes_through_the_template_or_stays_raw(client: httpx.AsyncClient) -> None:
    (whole,) = await ask(client, "generate", prompt="Once upon a time", system="Tell of a fox.", stream=False)
    messages = [{"role": "system", "content": "Tell of a fox."}, *MESSAGES]
    chat = {"messages": messages, "max_tokens": 12, "temperature": 0}
    expected = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]["content"]
    assert whole["response"] == expected
    lines = await ask(client, "generate", prompt="Once upon a time", raw=True)
    completion = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    expected = (await client.post("/v1/completions", json=completion)).json()["choices"][0]["text"]
    assert "".join(line["response"] for line in lines) == expected
    options = {"temperature": 0, "num_predict": -1, "stop": ["."]}
    (raw,) = await ask(client, "generate", prompt="Once upon a time", raw=True, options=options, stream=False)
    assert (raw["done_reason"], raw["eval_count"] > 0) == ("stop", True)
    (loaded,) = await ask(client, "generate", stream=False)
    assert (loaded["done"], loaded["done_reason"], loaded["response"]) == (True, "load", "")


async def test_calls_there_and_back(client: httpx.AsyncClient) -> None:
    demanded = {"tools": TOOLS, "tool_choice": "required", "options": {"num_predict": 200, "temperature": 0}}
    demanded["parallel_tool_calls"] = False
    (whole,) = await ask(client, "chat", messages=MESSAGES, stream=False, **demanded)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert isinstance(call["function"]["arguments"], dict)
    lines = await ask(client, "chat", messages=MESSAGES, **demanded)
    (told,) = [line for line in lines if "tool_calls" in line["message"]]
    assert told["message"]["tool_calls"][0]["function"] == call["function"]
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    history = [*MESSAGES, whole["message"], result, {"role": "user", "content": "And then?"}]
    (answer,) = await ask(client, "chat", messages=history, stream=False)
    assert answer["prompt_eval_count"] > whole["prompt_eval_count"]


async def test_a_form(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    fields = {"messages": MESSAGES, "stream": False, "options": {"num_predict": 60}}
    (held,) = await ask(client, "chat", format=schema, **fields)
    assert json.loads(held["message"]["content"])["n"] in (1, 2)


@pytest.mark.parametrize(
    ("path", "fields", "status", "told"),
    [
        ("chat", {"messages": MESSAGES, "model": "king"}, 404, "'king'"),
        ("chat", {}, 400, "messages"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, 400, "takes text only"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": [3]}]}, 400, "messages[0]: images must be"),
        ("generate", {"prompt": "a", "images": "x"}, 400, "images must be a list"),
        ("generate", {"prompt": "a", "images": ["x"], "raw": True}, 400, "leave raw out"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "a call needs"),
        ("chat", {"messages": MESSAGES, "format": "yaml"}, 400, "'yaml'"),
        ("chat", {"messages": MESSAGES, "think": "much"}, 400, "think='much' must be true, false, or one of 'low'"),
        ("chat", {"messages": MESSAGES, "options": {"temperature": -1}}, 400, "options.temperature"),
        ("chat", {"messages": MESSAGES, "options": {"top_p": "much"}}, 400, "top_p"),
        ("chat", {"messages": MESSAGES, "n": 2}, 400, "n is not supported"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("generate", {"prompt": "a", "model": None}, 400, "model"),
        ("embed", {"input": "a"}, 400, "vectors"),
        ("nothing", {}, 404, "/api/nothing"),
    ],
)
async def test_errors_are_those_of_the_api(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], status: int, told: str
) -> None:
    response = await client.post(f"/api/{path}", json={"model": "storyteller", **fields})
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert told in response.json()["error"]


async def test_names_and_what_has_no_effect(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/api/tags")).json()["models"]
    assert card["name"] == card["model"] == "storyteller:latest"
    assert (await client.get("/api/version")).json()["version"]
    body = {"model": "storyteller", "messages": MESSAGES, "options": {"num_ctx": 9, "num_predict": 1}, "think": True}
    response = await client.post("/api/chat", json=body)
    told = response.headers["x-actorllm-warning"]
    assert "options.num_ctx has no effect" in told
    assert "think=true has no effect" in told
    body = {"model": "storyteller", "prompt": "Once", "raw": True, "options": {"num_predict": 1}, "think": False}
    response = await client.post("/api/generate", json=body)
    assert "think has no effect beside raw=true" in response.headers["x-actorllm-warning"]


@pytest.mark.parametrize(
    ("path", "fields", "empty"),
    [
        ("chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("generate", {"prompt": ""}, {"response": ""}),
    ],
)
async def test_a_request_without_a_prompt_asks_for_the_model_to_be_loaded(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], empty: dict[str, Any]
) -> None:
    response = await client.post(f"/api/{path}", json={"model": "storyteller", **fields})
    assert response.status_code == 200, response.text
    tree = response.json()
    assert tree == {
        "model": "storyteller",
        "created_at": tree["created_at"],
        **empty,
        "done": True,
        "done_reason": "load",
    }
    assert (await client.post(f"/api/{path}", json={"model": "none", **fields})).status_code == 404
