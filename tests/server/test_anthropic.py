"""`/v1/messages`, as Anthropic's clients use it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.server.anthropic_events import BODY, MESSAGES, alike, streamed
from tests.server.conftest import client_of

pytestmark = pytest.mark.anyio

TOOL = {
    "name": "weather",
    "description": "The weather at a place.",
    "input_schema": {"type": "object", "properties": {"at": {"enum": ["home", "sea"]}}, "required": ["at"]},
}


async def send(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/messages", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    tree: dict[str, Any] = response.json()
    return tree


async def test_a_message_is_the_answer_of_a_chat(client: httpx.AsyncClient) -> None:
    system = [{"type": "text", "text": "Tell of a fox."}]
    message = await send(client, system=system)
    as_chat = {"messages": [{"role": "system", "content": "Tell of a fox."}, *MESSAGES], "max_tokens": 12}
    chat = (await client.post("/v1/chat/completions", json={**as_chat, "temperature": 0})).json()
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "storyteller")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 12
    counted = await client.post("/v1/messages/count_tokens", json={"messages": MESSAGES, "system": "Tell of a fox."})
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}
    stopped = await send(client, stop_sequences=["."], max_tokens=99)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ".")


async def test_an_empty_answer_is_the_same_whole_and_streamed(client: httpx.AsyncClient) -> None:
    first = (await send(client, max_tokens=1))["content"][0]["text"]
    asked = {"stop_sequences": [first], "max_tokens": 4}
    whole = await send(client, **asked)
    assert (whole["content"], whole["stop_sequence"]) == ([{"type": "text", "text": ""}], first)
    assert alike((await streamed(client, **asked))[0]) == alike(whole)


async def test_a_stream_makes_the_same_message(client: httpx.AsyncClient) -> None:
    message, events = await streamed(client, max_tokens=30)
    assert alike(message) == alike(await send(client, max_tokens=30))
    kinds = [event["type"] for event in events if event["type"] not in ("ping", "content_block_delta")]
    edges = ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert kinds == edges
    assert len(events) > len(edges) + 3


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=["any", "tool"])
async def test_tools_there_and_back(client: httpx.AsyncClient, choice: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200}
    asked["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = await send(client, **asked)
    (call,) = whole["content"]
    assert (call["type"], call["name"], whole["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert call["input"]["at"] in ("home", "sea")
    message, events = await streamed(client, **asked)
    assert alike(message) == alike(whole)
    assert sum(event["type"] == "content_block_delta" for event in events) > 1
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And then?"}]},
    ]
    told = await send(client, messages=history, tools=[TOOL], tool_choice={"type": "none"})
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    as_chat = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": call["id"], "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        {"role": "user", "content": "And then?"},
    ]
    chat = (await client.post("/v1/chat/completions", json={"messages": as_chat, "max_tokens": 1})).json()
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "role='king'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'base64' or 'url'"),
        ({"messages": [{"role": "user", "content": 3}]}, "list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [TOOL], "tool_choice": {"type": "perhaps"}}, "'perhaps'"),
        ({"tools": [TOOL], "tool_choice": {"type": {}}}, "type={}"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": {}}, "top_p"),
        ({"n": 2}, "n is not supported"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config"),
    ],
)
async def test_errors_are_those_of_the_api(client: httpx.AsyncClient, fields: dict[str, Any], told: str) -> None:
    response = await client.post("/v1/messages", json={**BODY, **fields})
    assert response.status_code == 400, response.text
    tree = response.json()
    assert set(tree) == {"type", "error"}
    assert (tree["type"], tree["error"]["type"]) == ("error", "invalid_request_error")
    assert told in tree["error"]["message"]


async def test_keys_and_models(llm: AsyncLLM) -> None:
    async with client_of(create_app(llm, api_key="secret")) as client:
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Basic secret"}):
            refused = await client.post("/v1/messages", json=BODY, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await client.post("/v1/messages", json=BODY, headers=headers)).status_code == 200
        headers = {"x-api-key": "secret"}
        other = await client.post("/v1/messages", json={**BODY, "model": "king"}, headers=headers)
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")


async def test_what_has_no_effect_is_told_and_a_schema_is_held(client: httpx.AsyncClient) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    response = await client.post("/v1/messages", json={**BODY, "thinking": thinking, "nonsense": 1})
    assert response.status_code == 200
    for word in ("thinking", "nonsense"):
        assert word in response.headers["x-actorllm-warning"]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = await send(client, output_config=config, max_tokens=60)
    assert json.loads(message["content"][0]["text"])["n"] in (1, 2)
