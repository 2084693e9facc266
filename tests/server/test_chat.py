"""`/v1/chat/completions`, and the demo's request as it stands in vLLM's fork for latency-sensitive requests."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.server.conftest import client_of, events_of

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Once upon a time there was a dog."}]
SHORT = {"max_tokens": 8, "seed": 3, "ignore_eos": True}


async def converse(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={"messages": MESSAGES, **SHORT, **fields})
    assert response.status_code == 200, response.text
    tree: dict[str, Any] = response.json()
    return tree


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "stream": True, **SHORT, **fields}
    return events_of(await client.post("/v1/chat/completions", json=body))


async def test_an_answer_is_that_of_the_engine(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.seed, params.ignore_eos = 8, 3, True
    *_, expected = [output async for output in llm.chat(MESSAGES, params)]
    tree = await converse(client)
    assert tree["object"] == "chat.completion"
    (choice,) = tree["choices"]
    message = {"role": "assistant", "content": expected.outputs[0].text, "refusal": None, "reasoning": None}
    assert choice["message"] == message
    assert choice["finish_reason"] == "length"
    assert tree["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


async def test_content_in_parts(client: httpx.AsyncClient) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert (await converse(client, messages=parts))["choices"] == (await converse(client))["choices"]


async def test_a_stream_tells_what_the_whole_answer_tells(client: httpx.AsyncClient) -> None:
    fields = {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["."], "max_tokens": 30}
    whole = await converse(client, **fields)
    events = await streamed(client, **fields, stream_options={"include_usage": True})
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    for choice in whole["choices"]:
        mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        logprobs = [one for c in mine if c["logprobs"] for one in c["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert all(len(one["top_logprobs"]) == 2 for one in logprobs)
    assert events[-1]["usage"] == whole["usage"]


async def test_without_extras_an_event_is_text(client: httpx.AsyncClient) -> None:
    whole = await converse(client, temperature=0)
    events = await streamed(client, temperature=0)
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_is_another_name_of_max_tokens(client: httpx.AsyncClient) -> None:
    for max_tokens in (None, 3):
        tree = await converse(client, max_tokens=max_tokens, max_completion_tokens=3)
        assert tree["usage"]["completion_tokens"] == 3


async def test_going_on_from_the_last_message(client: httpx.AsyncClient) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The dog"}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    plain = (await converse(client, **fields))["choices"][0]["message"]["content"]
    echoed = (await converse(client, **fields, echo=True))["choices"][0]["message"]["content"]
    assert echoed == "The dog" + plain
    events = await streamed(client, **fields, echo=True)
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == echoed


async def test_cache_salt_keeps_prompts_apart(client: httpx.AsyncClient) -> None:
    long = [{"role": "user", "content": "The dog ran to the park. " * 20}]

    async def num_cached(**fields: Any) -> int:
        tree = await converse(client, messages=long, **fields)
        cached: int = tree["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    await num_cached()
    assert await num_cached() > 0
    assert await num_cached(cache_salt="a") == 0
    assert await num_cached(cache_salt="a") > 0


async def test_the_reference_demo(client: httpx.AsyncClient) -> None:
    fields = {"temperature": 0.7, "length_penalty": 1.0, "max_tokens": 100, "min_tokens": 100}
    latency = {"is_latency_sensitive": "True", "slo": 0.05}
    response = await client.post(
        "/v1/chat/completions", json={"model": "storyteller", "messages": MESSAGES, **fields, **latency}
    )
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 100
    assert "x-actorllm-warning" not in response.headers


async def test_latency_fields_reach_the_scheduler(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    generate = llm.generate
    monkeypatch.setattr(llm, "generate", lambda *a, **k: seen.append(k) or generate(*a, **k))
    latency = {
        "is_latency_sensitive": "True",
        "slo": {"tpot": 0.05},
        "type_info": "chat",
        "tenant": "a",
        "priority": -1,
    }
    async with client_of(create_app(llm), headers={"x-slo-ttft-ms": "200", "x-slo-tpot-ms": "10"}) as client:
        tree = await converse(client, **latency, return_metrics=True)
        assert tree["metrics"]["slo_met"] in (True, False)
        await converse(client)
        response = await client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-slo-ttft-ms": "soon"}
        )
    first, second = seen
    slo = first.pop("slo")
    assert (slo.ttft, slo.tpot, slo.e2e) == (0.2, 0.05, None)  # the body goes before the header
    assert first == {"is_latency_sensitive": True, "type_info": "chat", "tenant": "a", "priority": -1}
    assert second["slo"].tpot == 0.01
    assert response.status_code == 400
    assert "x-slo-ttft-ms='soon'" in response.json()["error"]["message"]
