"""Answers and events of the server, held against the description that OpenAI publishes of its API."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import orjson
import pytest
from jsonschema import ValidationError

from actorllm import AsyncLLM
from actorllm.errors import ConfigError
from actorllm.server import create_app
from tests.server.conftest import client_of, events_of
from tests.server.openai_description.description import check, check_event, check_published

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["fox"]}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 2, "stop": ["."]},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    "a call": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 64},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_metrics": True},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"prompt": ["Once", "The fox"], "n": 2, "return_token_ids": True},
    "echo": {"echo": True, "logprobs": 2},
    "usage": {"stream_options": {"include_usage": True}},
}


def of(fields: dict[str, Any], is_streamed: bool, **more: Any) -> dict[str, Any]:
    body = {**more, "max_tokens": 8, **fields, "stream": is_streamed}
    if not is_streamed:
        body.pop("stream_options", None)
    return body


@pytest.mark.parametrize("name", CHATS)
async def test_chats(client: httpx.AsyncClient, name: str) -> None:
    whole = await client.post("/v1/chat/completions", json=of(CHATS[name], False, messages=MESSAGES))
    assert whole.status_code == 200, whole.text
    tree = whole.json()
    check("CreateChatCompletionResponse", tree)
    for field in ("service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"):
        assert field in tree
    for choice in tree["choices"]:
        assert {"logprobs", "stop_reason", "token_ids"} <= set(choice)
        assert {"content", "refusal", "reasoning"} <= set(choice["message"])
    for event in events_of(await client.post("/v1/chat/completions", json=of(CHATS[name], True, messages=MESSAGES))):
        check("CreateChatCompletionStreamResponse", event)


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_completions(client: httpx.AsyncClient, name: str) -> None:
    body = {"prompt": "Once", **COMPLETIONS[name]}
    whole = await client.post("/v1/completions", json=of(body, False))
    assert whole.status_code == 200, whole.text
    check("CreateCompletionResponse", whole.json())
    for choice in whole.json()["choices"]:
        assert {"stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"} <= set(choice)
    for event in events_of(await client.post("/v1/completions", json=of(body, True))):
        check("CreateCompletionResponse", event)


@pytest.mark.parametrize(
    "fields",
    [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"stop": ["."], "max_output_tokens": 99}],
    ids=["plain", "log-probabilities", "completed"],
)
async def test_responses(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"input": "Once upon a time", "max_output_tokens": 8, **fields}
    whole = await client.post("/v1/responses", json=body)
    assert whole.status_code == 200, whole.text
    check("Response", whole.json())
    stream = await client.post("/v1/responses", json={**body, "stream": True})
    blocks = stream.text.split("\n\n")[:-1]
    assert len(blocks) > 5
    for block in blocks:
        kind, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        check_event(event)


async def test_models_and_errors(client: httpx.AsyncClient) -> None:
    check("ListModelsResponse", (await client.get("/v1/models")).json())
    check("Model", (await client.get("/v1/models/storyteller")).json())
    for path, body in (("/v1/completions", {"prompt": 3}), ("/v1/chat/completions", {}), ("/v1/responses", {"n": 2})):
        response = await client.post(path, json=body)
        assert response.status_code == 400
        check("ErrorResponse", response.json())


async def test_a_status_is_a_number_for_clients_of_vllm_and_a_text_for_those_of_openai(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post("/v1/completions", json={"prompt": 3})
    told = response.json()["error"]
    assert told["code"] == response.status_code == 400
    request: Any = response.request
    read = openai.APIError(told["message"], request, body=told)  # as the library reads a body
    assert (read.code, read.param) == ("400", "prompt")
    check_published("Error", {"message": read.message, "type": read.type, "param": read.param, "code": read.code})
    with pytest.raises(ValidationError, match="400 is not valid"):
        check_published("Error", told)


@pytest.mark.parametrize(
    ("fields", "headers", "told"),
    [
        ({"prompt": 3}, {}, (400, "invalid_request_error", "prompt", None)),
        ({"prompt": [5] * 2000}, {}, (400, "invalid_request_error", "prompt", "context_length_exceeded")),
        ({"prompt": "a", "model": "gpt-4o"}, {}, (404, "invalid_request_error", "model", "model_not_found")),
        ({"prompt": "a"}, {"authorization": "Bearer x"}, (401, "invalid_request_error", None, "invalid_api_key")),
        ({"prompt": "a" * 5000}, {}, (413, "invalid_request_error", None, "request_too_large")),
    ],
)
async def test_errors_are_named_as_by_openai_where_the_server_is_told_so(
    llm: AsyncLLM, fields: dict[str, Any], headers: dict[str, str], told: tuple[Any, ...]
) -> None:
    app = create_app(llm, error_format="openai", api_key="k", max_body_bytes=4500)
    async with client_of(app) as client:
        body = {"prompt": fields["prompt"], **fields}
        response = await client.post("/v1/completions", json=body, headers={"authorization": "Bearer k", **headers})
    error = response.json()["error"]
    check_published("ErrorResponse", response.json())
    assert (response.status_code, error["type"], error["param"], error["code"]) == told


async def test_the_format_of_errors_holds_for_routes_and_responses(llm: AsyncLLM) -> None:
    async with client_of(create_app(llm, error_format="openai")) as client:
        for path, body in (("/v1/nothing", {}), ("/v1/responses", {"n": 2}), ("/v1/chat/completions", {})):
            check_published("ErrorResponse", (await client.post(path, json=body)).json())
        theirs = (await client.post("/v1/messages", json={})).json()
        assert theirs["error"]["type"] == "invalid_request_error"
        assert theirs["type"] == "error", "protocols with a form of their own keep it"
    with pytest.raises(ConfigError, match="error_format='http' must be 'vllm' or 'openai'"):
        create_app(llm, error_format="http")


async def test_what_asks_for_another_effort_is_taken_with_a_warning(client: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "reasoning_effort": "low", "verbosity": "high"}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    told = response.headers["x-actorllm-warning"]
    assert "reasoning_effort has no effect" in told
    assert "verbosity has no effect" in told


async def test_either_side_of_a_prompt_may_be_left_out(client: httpx.AsyncClient) -> None:
    body = {"prompt": [10, 11, 12, 13], "max_tokens": 1, "truncate_prompt_tokens": 2, "return_token_ids": True}
    for side, kept in (("left", [12, 13]), ("right", [10, 11]), (None, [12, 13])):
        response = await client.post("/v1/completions", json={**body, "truncation_side": side})
        assert response.json()["choices"][0]["prompt_token_ids"] == kept
    refused = await client.post("/v1/completions", json={**body, "truncation_side": "up"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "truncation_side"
    assert "'left' or 'right'" in refused.json()["error"]["message"]


def test_the_check_finds_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="finish_reason"):
        check("CreateChatCompletionResponse", {"id": "a", "choices": [{"index": 0}]})
