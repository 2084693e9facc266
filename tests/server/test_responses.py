"""`/v1/responses`, as openai's own client reads it: its types, the order of its events, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import openai
import orjson
import pytest
from fastapi import FastAPI

from actorllm import AsyncLLM
from actorllm.errors import RequestFailedError
from actorllm.server.envelope import error_of
from actorllm.server.protocol import Body
from actorllm.server.responses.request import ResponsesRequest, ask
from actorllm.server.sampling import Defaults
from tests.server.conftest import client_of

INPUT = "Once upon a time"


@pytest.fixture
async def openai_client(app: FastAPI) -> AsyncIterator[openai.AsyncOpenAI]:
    base: Any = openai._base_client
    module = (
        base.httpx2 if hasattr(base, "httpx2") else base.httpx
    )  # the one that this version of the client is made for
    async with (
        module.AsyncClient(transport=module.ASGITransport(app)) as connection,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=connection, max_retries=0) as client,
    ):
        yield client


async def test_a_whole_response(openai_client: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    response = await openai_client.responses.create(
        model="storyteller",
        input=INPUT,
        instructions="Tell of a fox.",
        max_output_tokens=20,
        temperature=0,
        metadata={"a": "b"},
        extra_body={"ignore_eos": True, "return_metrics": True, "slo": {"ttft": 100}},
    )
    assert (response.object, response.model, response.status) == ("response", "storyteller", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert response.output_text == item.content[0].text != ""
    assert (response.instructions, response.temperature, response.max_output_tokens) == ("Tell of a fox.", 0, 20)
    assert (response.metadata, response.store, response.tools) == ({"a": "b"}, True, [])
    usage = response.usage
    assert usage is not None
    assert usage.output_tokens == 20
    assert usage.total_tokens == usage.input_tokens + 20
    assert response.metrics["slo_met"] is True  # type: ignore[attr-defined]
    messages = [{"role": "system", "content": "Tell of a fox."}, {"role": "user", "content": INPUT}]
    chat = {"messages": messages, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    same = (await client.post("/v1/chat/completions", json=chat)).json()
    assert same["choices"][0]["message"]["content"] == response.output_text
    assert same["usage"]["prompt_tokens"] == usage.input_tokens


async def test_the_events_of_a_stream(openai_client: openai.AsyncOpenAI) -> None:
    wanted: Any = {"model": "storyteller", "input": INPUT, "max_output_tokens": 24, "temperature": 0}
    whole = await openai_client.responses.create(**wanted)
    events = [event async for event in await openai_client.responses.create(**wanted, stream=True)]
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    last = events[-1].response
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3  # a reader that is slower than the engine gets several tokens at once
    assert "".join(deltas) == last.output_text == whole.output_text
    assert last.usage == whole.usage
    assert last.id == events[0].response.id
    item_ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert item_ids == {last.output[0].id} == {events[2].item.id}


async def test_the_clients_own_reading_of_a_stream(openai_client: openai.AsyncOpenAI) -> None:
    """Which wants the answer to end by itself."""
    wanted: Any = {"model": "storyteller", "input": INPUT, "temperature": 0, "extra_body": {"stop": ["."]}}
    async with openai_client.responses.stream(**wanted) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text


async def test_a_conversation_as_input(openai_client: openai.AsyncOpenAI) -> None:
    first = await openai_client.responses.create(model="storyteller", input=INPUT, max_output_tokens=8, temperature=0)
    history: Any = [
        {"role": "developer", "content": "Tell of a fox."},
        {"role": "user", "content": [{"type": "input_text", "text": INPUT}]},
        *(item.model_dump() for item in first.output),
        {"type": "message", "role": "user", "content": "And then?"},
    ]
    second = await openai_client.responses.create(model="storyteller", input=history, max_output_tokens=8)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 8
    assert second.output_text


async def test_log_probabilities_and_a_schema(openai_client: openai.AsyncOpenAI) -> None:
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5}
    response = await openai_client.responses.create(model="storyteller", input=INPUT, **wanted)
    entries = response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert len(entries) == 5
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert "".join(entry.token for entry in entries).strip() == response.output_text.strip()
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema}}
    constrained = await openai_client.responses.create(model="storyteller", input=INPUT, text=text)
    assert json.loads(constrained.output_text)["n"] in (1, 2)
    assert constrained.status == "completed"
    assert constrained.text is not None
    assert constrained.text.format.type == "json_schema"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", ""),
        ({"input": 3}, "input", ""),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "arguments=None"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input", "output"),
        ({"input": [{"type": "web_search_call"}]}, "input", "'web_search_call'"),
        ({"input": [{"role": "king", "content": "a"}]}, "input", "role='king'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": "a " * 3000}, "input", "max_model_len"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "a", "max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 3, "min_tokens": 5}, "min_tokens", "max_output_tokens=3"),
        (
            {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 1000},
            "top_logprobs",
            "top_logprobs=1000",
        ),
        ({"input": "a", "temperature": -1}, "temperature", ">= 0"),
        ({"input": "a", "conversation": "c"}, "conversation", "not supported"),
        ({"input": "a", "background": True, "store": False}, "store", "no client waits"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"input": "a", "n": 2}, "n", "not supported"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools", "name=None"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "truncation": "auto"}, "truncation", "'disabled'"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include", "file_search_call"),
        ({"input": "a", "top_logprobs": 3}, "top_logprobs", "include"),
        ({"input": "a", "stream_options": {}}, "stream_options", "stream=true"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text", "'json_schema'"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text", "'schema'"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
            "text",
            "text.format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_told(client: httpx.AsyncClient, body: Any, param: str, told: str, stream: bool) -> None:
    if stream and "stream_options" in body:
        body = {"input": "a", "stream_options": {"nonsense": 1}}
        told = "nonsense"
    response = await client.post("/v1/responses", json={**body, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert told in error["message"]


async def test_what_has_no_effect_is_told(client: httpx.AsyncClient) -> None:
    body = {
        "input": "a",
        "max_output_tokens": 1,
        "reasoning": {"effort": "low"},
        "user": "me",
        "tools": [],
    }
    response = await client.post("/v1/responses", json=body)
    assert response.status_code == 200
    warned = response.headers["x-actorllm-warning"]
    assert "reasoning" in warned
    assert "user" not in warned


async def test_a_response_that_is_aborted_ends_with_what_there_is(llm: AsyncLLM, app: FastAPI) -> None:
    body: dict[str, Any] = {"input": INPUT, "request_id": "mine", "ignore_eos": True, "max_output_tokens": 900}
    async with client_of(app) as client:

        async def abort() -> None:
            while not (await client.post("/abort_requests", json={"request_ids": ["resp_mine"]})).json()["num_aborted"]:
                pass

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort)
            response = (await client.post("/v1/responses", json=body)).json()
    assert response["status"] == "incomplete"
    assert response["usage"]["output_tokens"] < 900


def test_a_stream_that_fails_says_so_with_its_last_event() -> None:
    defaults = Defaults(sampling={}, max_prompt_characters=100)
    shape = ask(ResponsesRequest(input="a", stream=True), {}, defaults, "m", lambda ids: "").shape
    made = shape.failure(error_of(RequestFailedError("the step raised")).body())
    event, data, *_ = made.decode().split("\n")
    assert event == "event: response.failed"
    response = orjson.loads(data.removeprefix("data: "))["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", "the step raised")
    assert issubclass(ResponsesRequest, Body)
