"""Thoughts of a model in the answers of every protocol: apart from its text, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import httpx
import orjson
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from actorllm.testing import ScriptedAsyncLLM
from tests.server.anthropic_events import alike, streamed
from tests.server.conftest import client_of
from tests.server.openai_description.description import check, check_event

pytestmark = pytest.mark.anyio

TEXT = "<think>Hm, well.</think>Yes."
MESSAGES = [{"role": "user", "content": TEXT}]
CALL = '<think>Hm, well.</think><tool_call>{"name": "look", "arguments": {"at": "fox"}}</tool_call>'
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[AsyncLLM]:
    """Answers with the last line of its prompt."""
    engine = ScriptedAsyncLLM(
        lambda prompt: prompt.strip().rpartition("\n")[2], reasoning_parser="qwen3", max_model_len=512
    )
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.fixture
async def client(scripted: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(scripted, tool_call_parser="hermes")) as made:
        yield made


@pytest.mark.parametrize("text", [TEXT, CALL], ids=["text", "call"])
async def test_responses(client: httpx.AsyncClient, text: str) -> None:
    body = {"input": text, "max_output_tokens": 200, "tools": [{"type": "function", **FUNCTION}]}
    whole = (await client.post("/v1/responses", json=body)).json()
    check("Response", whole)
    thought, answer = whole["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm, well."}])
    assert answer["type"] == ("message" if text == TEXT else "function_call")
    stream = (await client.post("/v1/responses", json={**body, "stream": True})).text
    events = [orjson.loads(block.partition("data: ")[2]) for block in stream.split("\n\n")[:-1]]
    for event in events:
        check_event(event)
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm, well."
    last = events[-1]["response"]["output"]
    assert [item["type"] for item in last] == [item["type"] for item in whole["output"]]
    assert last[1].get("content") == answer.get("content")
    more = {**body, "input": "Yes.", "previous_response_id": whole["id"]}
    assert (await client.post("/v1/responses", json=more)).json()["output"][-1]["content"][0]["text"] == "Yes."


async def test_messages(client: httpx.AsyncClient) -> None:
    body = {"model": "storyteller", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
    whole = (await client.post("/v1/messages", json={**body, "model": None})).json()
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hm, well.", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]
    message, _ = await streamed(client, **{**body, "model": None})
    assert alike(message) == alike(whole)


async def test_ollama(client: httpx.AsyncClient) -> None:
    name = (await client.get("/api/tags")).json()["models"][0]["name"]
    body = {"model": name, "messages": MESSAGES, "options": {"num_predict": 200}}
    whole = (await client.post("/api/chat", json={**body, "stream": False})).json()["message"]
    assert whole == {"role": "assistant", "content": "Yes.", "thinking": "Hm, well."}
    lines = [orjson.loads(line)["message"] for line in (await client.post("/api/chat", json=body)).text.splitlines()]
    assert "".join(line.get("thinking", "") for line in lines) == "Hm, well."
    assert "".join(line["content"] for line in lines) == "Yes."


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_counts_the_thought_in_chat(client: httpx.AsyncClient, scripted: AsyncLLM, n: int) -> None:
    expected = len(scripted.tokenizer.encode("Hm, well.", add_special_tokens=False)) * n
    body = {"messages": MESSAGES, "max_tokens": 200, "n": n}
    whole = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    assert whole["completion_tokens_details"] == {"reasoning_tokens": expected}
    streamed_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = (await client.post("/v1/chat/completions", json=streamed_body)).text.split("\n\n")
    last = orjson.loads(lines[-3].removeprefix("data: "))
    assert last["usage"] == whole
    hidden = (await client.post("/v1/chat/completions", json={**body, "include_reasoning": False})).json()["usage"]
    assert hidden == whole


async def test_usage_counts_the_thought_in_responses(client: httpx.AsyncClient, scripted: AsyncLLM) -> None:
    expected = len(scripted.tokenizer.encode("Hm, well.", add_special_tokens=False))
    body = {"input": TEXT, "max_output_tokens": 200}
    whole = (await client.post("/v1/responses", json=body)).json()["usage"]
    assert whole["output_tokens_details"] == {"reasoning_tokens": expected}
    stream = (await client.post("/v1/responses", json={**body, "stream": True})).text
    last = orjson.loads(stream.split("\n\n")[-2].partition("data: ")[2])
    assert last["response"]["usage"] == whole


async def test_several_conversations(scripted: AsyncLLM) -> None:
    """Each is read as it is alone: thoughts apart, in the role that the server gives to answers."""
    others = [{"role": "user", "content": "Only text."}]
    body = {"max_tokens": 200, "temperature": 0}
    async with client_of(create_app(scripted, response_role="narrator")) as client:
        tree = (await client.post("/v1/chat/completions/batch", json={**body, "messages": [MESSAGES, others]})).json()
        alone = [
            (await client.post("/v1/chat/completions", json={**body, "messages": messages})).json()
            for messages in (MESSAGES, others)
        ]
    assert [one["message"] for one in tree["choices"]] == [one["choices"][0]["message"] for one in alone]
    message = tree["choices"][0]["message"]
    assert (message["role"], message["reasoning"], message["content"]) == ("narrator", "Hm, well.", "Yes.")
    told = [one["usage"]["completion_tokens_details"]["reasoning_tokens"] for one in (tree, *alone)]
    assert told[0] == sum(told[1:]) > 0


TOLD = "{% for one in messages %}{{ one['content'] }}{% endfor %}\n\n[{{ enable_thinking }} {{ reasoning_effort }}]"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "[ ]"),
        ({"think": True}, "[True ]"),
        ({"think": False}, "[False none]"),
        ({"think": "high"}, "[True high]"),
        ({"think": "low", "reasoning_effort": "high"}, "[True high]"),
        ({"think": True, "chat_template_kwargs": {"enable_thinking": False}}, "[False ]"),
    ],
    ids=str,
)
async def test_how_much_to_think_is_told_to_the_template_by_ollama(
    scripted: AsyncLLM, fields: dict[str, object], told: str
) -> None:
    async with client_of(create_app(scripted, chat_template=TOLD)) as client:
        name = (await client.get("/api/tags")).json()["models"][0]["name"]
        body = {"model": name, "messages": MESSAGES, "options": {"num_predict": 60}, "stream": False, **fields}
        response = await client.post("/api/chat", json=body)
    assert response.json()["message"]["content"] == told
    assert "think" not in response.headers.get("x-actorllm-warning", "")
