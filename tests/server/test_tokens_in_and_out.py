"""vLLM's paths for programs that split the work: render, token ids in and out, several conversations, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from actorllm.types.params import SamplingParams
from tests.server.conftest import events_of
from tests.server.openai_description.description import check

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def post(client: httpx.AsyncClient, path: str, body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 3, "top_p": 0.9, "stop": ["."], "logit_bias": {"17": -5.0}, "bad_words": ["fox"]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}}},
        {"tools": [TOOL], "tool_choice": "required"},
    ],
    ids=["greedy", "sampled", "schema", "tools"],
)
async def test_what_is_rendered_gives_the_same_tokens(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "return_token_ids": True, **fields}
    expected = await post(client, "/v1/chat/completions", body)
    rendered = await post(client, "/v1/chat/completions/render", {**body, "request_id": "mine"})
    assert rendered["token_ids"] == expected["prompt_token_ids"]
    assert (rendered["request_id"], rendered["model"], rendered["sampling_params"]["max_tokens"]) == (
        *("mine", "storyteller"),
        12,
    )
    answer = await post(client, "/inference/v1/generate", rendered)
    assert answer["request_id"] == "mine"
    (choice,), (other,) = answer["choices"], expected["choices"]
    assert choice["token_ids"] == other["token_ids"]
    assert choice["finish_reason"] == {"tool_calls": "stop"}.get(other["finish_reason"], other["finish_reason"])
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


async def test_prompts_are_rendered_one_by_one(client: httpx.AsyncClient) -> None:
    texts = ["Once upon", "The fox"]
    rendered = await post(client, "/v1/completions/render", {"prompt": texts, "max_tokens": 3, "cache_salt": "a"})
    for one, text in zip(rendered, texts, strict=True):
        assert one["token_ids"] == (await post(client, "/tokenize", {"prompt": text}))["tokens"]
        assert one["cache_salt"] == "a"
    (ids,) = await post(client, "/v1/completions/render", {"prompt": [7, 8, 9]})
    assert (ids["token_ids"], ids["sampling_params"]["max_tokens"]) == ([7, 8, 9], 16)


async def test_tokens_are_streamed_with_log_probabilities_and_text(client: httpx.AsyncClient) -> None:
    sampled = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "seed": 3}
    params = {**sampled, "max_tokens": 6, "logprobs": 2, "ignore_eos": True, "n": 2}
    body = {"token_ids": [10, 11, 12], "sampling_params": params, "return_token_ids": True}
    whole = await post(client, "/inference/v1/generate", body)
    assert whole["prompt_token_ids"] == [10, 11, 12]
    entry = whole["choices"][0]["logprobs"]["content"][0]
    assert entry["token_id"] == whole["choices"][0]["token_ids"][0] == entry["top_logprobs"][0]["token_id"]
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(await client.post("/inference/v1/generate", json=stream))
    assert [event.get("prompt_token_ids") for event in events][:2] == [[10, 11, 12], None]
    assert events[-1]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"],
    }
    choices = [choice for event in events for choice in event["choices"]]
    for index in (0, 1):
        ids = [i for choice in choices if choice["index"] == index for i in choice["token_ids"]]
        assert ids == whole["choices"][index]["token_ids"]
    unlimited = await post(client, "/inference/v1/generate", {**IDS, "sampling_params": {"stop": ["."], "seed": 1}})
    assert unlimited["choices"][0]["finish_reason"] == "stop"
    assert len(unlimited["choices"][0]["token_ids"]) > 16
    text = await post(client, "/inference/v1/generate", {**body, "output_mode": "text"})
    completion = {**sampled, "prompt": [10, 11, 12], "max_tokens": 6, "ignore_eos": True, "n": 2}
    expected = (await post(client, "/v1/completions", completion))["choices"][0]["text"]
    assert text["choices"][0]["text"] == expected
    assert "".join(one["token"] for one in text["choices"][0]["logprobs"]["content"]) == expected


async def test_several_conversations_are_as_many_choices(client: httpx.AsyncClient) -> None:
    others = [{"role": "user", "content": "Tell of a fox."}]
    body = {"max_tokens": 8, "temperature": 0, "logprobs": True, "return_token_ids": True}
    tree = await post(client, "/v1/chat/completions/batch", {**body, "messages": [MESSAGES, others]})
    check("CreateChatCompletionResponse", tree)
    assert [choice["index"] for choice in tree["choices"]] == [0, 1]
    num_prompt = 0
    for choice, messages in zip(tree["choices"], (MESSAGES, others), strict=True):
        single = await post(client, "/v1/chat/completions", {**body, "messages": messages})
        assert choice["message"] == single["choices"][0]["message"]
        assert choice["token_ids"] == single["choices"][0]["token_ids"]
        num_prompt += single["usage"]["prompt_tokens"]
    assert tree["usage"]["prompt_tokens"] == num_prompt


async def test_what_conversations_share_is_checked_once(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[Any] = []
    check_all = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda params: (checks.append(params), check_all(params))[1])
    body = {"messages": [MESSAGES] * 20, "max_tokens": 1, "allowed_token_ids": [259, 17]}
    assert len((await post(client, "/v1/chat/completions/batch", body))["choices"]) == 20
    body = {"prompt": ["Once"] * 20, "max_tokens": 1, "allowed_token_ids": [259, 17]}
    assert len((await post(client, "/v1/completions", body))["choices"]) == 20
    assert len(checks) <= 6


IDS = {"token_ids": [1], "sampling_params": {}}
MANY = [[1]] * 5000
BIAS = {str(number): 1.0 for number in range(100)}
REGEX = {"structured_outputs": {"regex": "a" * 20_000}}


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        ("/inference/v1/generate", {"sampling_params": {}}, "token_ids", "required"),
        ("/inference/v1/generate", {**IDS, "token_ids": []}, "token_ids", "empty"),
        ("/inference/v1/generate", {**IDS, "token_ids": [1 << 30]}, "token_ids", "vocabulary"),
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params", "required"),
        (
            "/inference/v1/generate",
            {**IDS, "sampling_params": {"temperature": -1}},
            "sampling_params",
            "temperature",
        ),
        ("/inference/v1/generate", {**IDS, "sampling_params": {"nonsense": 1}}, "sampling_params", "nonsense"),
        ("/inference/v1/generate", {**IDS, "output_mode": "sound"}, "output_mode", "'sound'"),
        ("/inference/v1/generate", {**IDS, "features": {}}, "features", "not supported"),
        ("/inference/v1/generate", {**IDS, "stream_options": {}}, "stream_options", "stream=true"),
        ("/v1/chat/completions/batch", {"messages": []}, "messages", "at least 1"),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES], "stream": True}, "stream", "several conversations"),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES], "n": 2}, "n", "n=2"),
        ("/v1/chat/completions/batch", {"messages": [[]]}, "messages", "no messages"),
        ("/v1/completions/render", {"prompt": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "cut"),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "temperature": -1}, "temperature", "temperature"),
        ("/v1/completions/render", {"prompt": MANY, "logit_bias": BIAS}, "prompt", "limit is 4194304 together"),
        ("/v1/completions/render", {"prompt": MANY, "allowed_token_ids": [9999999]}, "allowed_token_ids", "vocabulary"),
        ("/v1/completions", {"prompt": MANY, **REGEX}, "prompt", "limit is 67108864 together"),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES] * 4000, **REGEX}, "messages", "limit is 67108864"),
    ],
)
async def test_what_is_wrong_is_told(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, told: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], told in error["message"]) == (param, True), error


@pytest.mark.parametrize("path", ["audio/speech", "images/generations"])
async def test_sound_and_pictures_are_refused_with_the_reason(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(f"/v1/{path}", content=b"x")
    assert response.status_code == 404
    assert "makes sound or pictures" in response.json()["error"]["message"]
