"""Tools, response formats and structured outputs over HTTP: what is demanded comes, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.random_schemas import matches
from tests.server.conftest import client_of, events_of

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "How is the weather in the forest?"}]
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["forest", "town"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE, "description": "of a place"}},
    {"type": "function", "function": {"name": "time", "parameters": None}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 200, "seed": 3, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


async def streamed(client: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that the deltas of a stream make together, with its finish_reason; and the deltas."""
    body = {"messages": MESSAGES, "max_tokens": 200, "seed": 3, "stream": True, **fields}
    events = events_of(await client.post("/v1/chat/completions", json=body))
    choices = [event["choices"][0] for event in events if event["choices"]]
    content, calls = "", []
    for choice in choices:
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({key: call[key] for key in ("id", "type")} | {"function": {**call["function"]}})
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return {"content": content, "calls": calls, "finish_reason": reasons}, [choice["delta"] for choice in choices]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "pythonic"])
@pytest.mark.parametrize(("choice", "reason"), [(NAMED, "stop"), ("required", "tool_calls")], ids=["named", "required"])
async def test_a_call_that_is_demanded(llm: AsyncLLM, parser: str, choice: Any, reason: str) -> None:
    async with client_of(create_app(llm, tool_call_parser=parser)) as client:
        fields = {"tools": TOOLS[:1], "tool_choice": choice, "parallel_tool_calls": False}
        whole = await ask(client, **fields)
        message = whole["message"]
        assert message["role"] == "assistant"
        assert message["content"] is None
        (call,) = message["tool_calls"]
        assert call["type"] == "function"
        assert call["id"]
        assert call["function"]["name"] == "weather"
        assert matches(json.loads(call["function"]["arguments"]), PLACE)
        assert whole["finish_reason"] == reason
        told, deltas = await streamed(client, **fields)
        assert told["content"] == ""
        assert told["finish_reason"] == [reason]
        (other,) = told["calls"]
        assert other["function"] == call["function"]
        begun = next(delta["tool_calls"][0] for delta in deltas if delta.get("tool_calls"))
        assert begun["function"]["name"] == "weather"


async def test_a_demanded_call_that_is_not_strict(client: httpx.AsyncClient) -> None:
    """Clients say so of every tool, and read the arguments by the schema: only what no grammar holds is left to the model."""
    function: dict[str, Any] = TOOLS[0]["function"]  # type: ignore[assignment]
    loose = {**function, "strict": False, "parameters": {**PLACE, "not": {"required": ["nowhere"]}}}
    fields = {"messages": MESSAGES, "tool_choice": "required", "parallel_tool_calls": False}
    response = await client.post(
        "/v1/chat/completions", json={**fields, "tools": [{"type": "function", "function": loose}]}
    )
    assert "not is not held" in response.headers["x-actorllm-warning"]
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert matches(json.loads(call["function"]["arguments"]), PLACE)
    refused = await client.post(
        "/v1/chat/completions",
        json={**fields, "tools": [{"type": "function", "function": {**loose, "strict": True}}]},
    )
    assert refused.status_code == 400
    assert "not" in refused.json()["error"]["message"]


async def test_several_calls(client: httpx.AsyncClient) -> None:
    """This model goes on calling as long as it may."""
    fields = {"tools": TOOLS[:1], "tool_choice": "required", "logit_bias": {"0": -100}, "max_tokens": 150}
    whole = await ask(client, **fields)
    calls = whole["message"]["tool_calls"]
    assert len(calls) > 1
    assert len({call["id"] for call in calls}) == len(calls)
    assert whole["finish_reason"] == "length"
    told, _ = await streamed(client, **fields)
    assert [call["function"] for call in told["calls"]] == [call["function"] for call in calls]


async def test_with_auto_the_model_answers_as_it_likes(client: httpx.AsyncClient) -> None:
    whole = await ask(client, tools=TOOLS, max_tokens=20)
    assert whole["message"]["content"]
    assert "tool_calls" not in whole["message"]
    assert whole["finish_reason"] == "length"
    plain = await ask(client, tools=TOOLS, tool_choice="none", max_tokens=20)
    assert plain["message"] == whole["message"]
    told, _ = await streamed(client, tools=TOOLS, max_tokens=20)
    assert told == {"content": whole["message"]["content"], "calls": [], "finish_reason": ["length"]}


async def test_strict_tools_beside_free_text(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    whole = await ask(client, tools=strict, max_tokens=20)
    assert whole["message"]["content"]
    body = {"messages": MESSAGES, "max_tokens": 2, "tools": strict}
    for parser, is_held in (("hermes", True), ("llama3_json", False), ("pythonic", False)):
        async with client_of(create_app(llm, tool_call_parser=parser)) as other:
            for fields in ({}, {"tool_choice": "required"}):
                response = await other.post("/v1/chat/completions", json={**body, **fields})
                warned = "strict" in response.headers["x-actorllm-warning"]
                assert warned == (not is_held and not fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_model_calls_by_itself_or_answers_in_the_format(client: httpx.AsyncClient, stream: bool) -> None:
    """With auto the model decides, here by the first character: that of a call, or that of the answer."""
    format = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    fields = {"tools": TOOLS[:1], "response_format": format, "parallel_tool_calls": False}

    async def told(first: str) -> tuple[str | None, list[Any], str]:
        bias = {"logit_bias": {str(ord(first) - ord("!") + 1): 100}}
        if stream:
            message, _ = await streamed(client, **fields, **bias)
            return message["content"], message["calls"], message["finish_reason"][0]
        whole = await ask(client, **fields, **bias)
        return whole["message"]["content"], whole["message"].get("tool_calls", []), whole["finish_reason"]

    content, (call,), reason = await told("<")
    assert not content
    assert matches(json.loads(call["function"]["arguments"]), PLACE)
    assert reason == "tool_calls"
    content, calls, reason = await told("{")
    assert calls == []
    assert matches(json.loads(content or ""), PLACE)
    assert reason == "stop"


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Bob"]}, "age": {"enum": [3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("parser", "schema"),
    [("llama3_json", PERSON), ("pythonic", {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 1})],
)
async def test_an_answer_that_begins_like_a_call(
    llm: AsyncLLM, parser: str, schema: dict[str, Any], stream: bool
) -> None:
    """Where a call has no marker, what is beside tools may have a name, too."""
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    fields = {"tools": TOOLS[:1], "response_format": format, "logit_bias": {str(ord("B") - ord("!") + 1): 100}}
    async with client_of(create_app(llm, tool_call_parser=parser)) as client:
        if stream:
            message, _ = await streamed(client, **fields)
            content, calls, reason = message["content"], message["calls"], message["finish_reason"][0]
        else:
            whole = await ask(client, **fields)
            content, calls = whole["message"]["content"], whole["message"].get("tool_calls", [])
            reason = whole["finish_reason"]
    assert (calls, reason) == ([], "stop")
    person = {"name": "Bob", "age": 3}
    assert json.loads(content) == ([person] if parser == "pythonic" else person)


async def test_response_formats(client: httpx.AsyncClient) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    whole = await ask(client, response_format=format)
    assert whole["finish_reason"] == "stop"
    assert matches(json.loads(whole["message"]["content"]), PLACE)
    told, _ = await streamed(client, response_format=format)
    assert told["content"] == whole["message"]["content"]
    whole = await ask(client, response_format={"type": "json_object"}, logit_bias={"93": 30})
    assert isinstance(json.loads(whole["message"]["content"]), dict)
    plain = await ask(client, response_format={"type": "text"}, max_tokens=8)
    assert plain["message"] == (await ask(client, max_tokens=8))["message"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_json": {"type": "integer"}, "guided_decoding_backend": "outlines"}, "-?[0-9]+"),
        ({"guided_json_object": True}, r"\s*\{"),
        ({"guided_json_object": False, "guided_choice": ["red"]}, "red"),
    ],
)
async def test_constraints_as_older_clients_of_vllm_give_them(
    client: httpx.AsyncClient, fields: dict[str, Any], pattern: str
) -> None:
    body = {"messages": [{"role": "user", "content": "dog"}], "max_tokens": 12, "seed": 1}
    response = await client.post("/v1/chat/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    assert re.match(pattern, response.json()["choices"][0]["message"]["content"])


async def test_structured_outputs_of_both_endpoints(client: httpx.AsyncClient) -> None:
    choice = {"structured_outputs": {"choice": ["sun", "rain"]}}
    assert (await ask(client, **choice))["message"]["content"] in ("sun", "rain")
    for fields in (choice, {"structured_outputs": {"regex": "sun|rain"}}):
        response = await client.post("/v1/completions", json={"prompt": "Tomorrow: ", "n": 2, **fields})
        assert {one["text"] for one in response.json()["choices"]} <= {"sun", "rain"}
        assert {one["finish_reason"] for one in response.json()["choices"]} == {"stop"}
    response = await client.post("/generate", json={"prompt": "Now: ", "structured_outputs": {"choice": ["sun"]}})
    assert response.json() == {"text": ["Now: sun"]}


async def test_a_template_that_shows_no_tools_is_told_of(client: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "tools": TOOLS}
    response = await client.post("/v1/chat/completions", json=body)
    assert "does not show them" in response.headers["x-actorllm-warning"]


async def test_messages_of_tools_are_taken(client: httpx.AsyncClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"at": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    assert (await ask(client, messages=messages, tools=TOOLS, max_tokens=4))["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": TOOLS, "response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "y" * 300_000}}}},
            "response_format",
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "qwen_xml"}}}, "response_format"),
        ({"response_format": {"type": []}}, "response_format"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_cannot_be_done_is_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": stream, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
