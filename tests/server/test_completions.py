"""`/v1/completions`: every kind of prompt, and a stream that tells what the whole answer tells."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.text.tokenizer import Tokenizer
from tests.server.conftest import events_of

pytestmark = pytest.mark.anyio

PROMPT = "Once upon a time"
SHORT = {"max_tokens": 8, "seed": 3, "ignore_eos": True}


async def complete(client: httpx.AsyncClient, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": prompt, **SHORT, **fields})
    assert response.status_code == 200, response.text
    tree: dict[str, Any] = response.json()
    return tree


async def streamed(client: httpx.AsyncClient, prompt: Any = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    return events_of(await client.post("/v1/completions", json={"prompt": prompt, "stream": True, **SHORT, **fields}))


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


async def test_an_answer_is_that_of_the_engine(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.seed, params.ignore_eos = 8, 3, True
    expected = await llm.complete(PROMPT, params)
    tree = await complete(client)
    assert tree["object"] == "text_completion"
    assert tree["id"].startswith("cmpl-")
    assert tree["model"] == "storyteller"
    (choice,) = tree["choices"]
    assert choice == {
        "index": 0,
        "text": expected.outputs[0].text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    num_prompt = len(expected.prompt_token_ids)
    assert tree["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 8,
        "total_tokens": num_prompt + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_text_and_ids_and_lists_of_both(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    other = "The dog"
    texts = [(await complete(client, prompt, temperature=0))["choices"][0]["text"] for prompt in (PROMPT, other)]
    ids = [Tokenizer(llm.config.model.path).encode(prompt).tolist() for prompt in (PROMPT, other)]
    assert (await complete(client, ids[0], temperature=0))["choices"][0]["text"] == texts[0]
    for several in ([PROMPT, other], ids, [PROMPT, ids[1]]):
        tree = await complete(client, several, temperature=0)
        assert [choice["text"] for choice in tree["choices"]] == texts
        assert [choice["index"] for choice in tree["choices"]] == [0, 1]
        assert tree["usage"]["completion_tokens"] == 16


async def test_a_stream_tells_what_the_whole_answer_tells(client: httpx.AsyncClient) -> None:
    fields = {"n": 2, "temperature": 1.0, "max_tokens": 12}
    for prompt in (PROMPT, [PROMPT, "The dog"]):
        whole = await complete(client, prompt, **fields)
        events = await streamed(client, prompt, **fields)
        for choice in whole["choices"]:
            assert joined(events, choice["index"]) == choice["text"]
        reasons = {c["index"]: c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]}
        assert reasons == {choice["index"]: "length" for choice in whole["choices"]}
        assert len({event["id"] for event in events}) == 1


async def test_a_client_says_how_many_tokens_an_event_has(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Once", "max_tokens": 10, "ignore_eos": True, "stream": True, "return_token_ids": True}
    events = events_of(await client.post("/v1/completions", json={**body, "stream_interval": 4}))
    sizes = [len(choice["token_ids"] or ()) for event in events for choice in event["choices"]]
    assert sum(sizes) == 10
    assert all(size >= 4 for size in sizes[1:-1])
    assert len(sizes) <= 4


async def test_usage_of_a_stream(client: httpx.AsyncClient) -> None:
    events = await streamed(client)
    assert not any("usage" in event for event in events)
    events = await streamed(client, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == (await complete(client))["usage"]
    assert not any("usage" in event for event in events[:-1])
    events = await streamed(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [8, 8]


@pytest.mark.parametrize("prompt", [PROMPT, "Once — 狗", [0, 2721, 645]], ids=["text", "wide", "ids"])
async def test_echo_and_logprobs(client: httpx.AsyncClient, prompt: Any) -> None:
    plain = await complete(client, prompt, logprobs=2)
    tree = await complete(client, prompt, logprobs=2, echo=True)
    (choice,) = tree["choices"]
    logprobs = choice["logprobs"]
    num_prompt = tree["usage"]["prompt_tokens"]
    assert "".join(logprobs["tokens"][num_prompt:]) == choice["text"][-len(plain["choices"][0]["text"]) :]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["text_offset"][0] == 0
    is_shown = isinstance(prompt, list)  # a text is not shown with the token that begins it
    for offset, token in list(zip(logprobs["text_offset"], logprobs["tokens"], strict=True))[0 if is_shown else 1 :]:
        assert choice["text"][offset:].startswith(token)
    (by_id,) = (await complete(client, prompt, logprobs=2, echo=True, return_tokens_as_token_ids=True))["choices"]
    assert by_id["logprobs"]["text_offset"] == logprobs["text_offset"]
    assert len(logprobs["tokens"]) == num_prompt + 8
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    assert logprobs["token_logprobs"][num_prompt:] == pytest.approx(plain["choices"][0]["logprobs"]["token_logprobs"])
    events = await streamed(client, prompt, logprobs=2, echo=True)
    assert joined(events) == choice["text"]
    for name in ("tokens", "text_offset"):
        assert [one for e in events for one in e["choices"][0]["logprobs"][name]] == logprobs[name]


async def test_echo_without_new_tokens_scores_a_text(client: httpx.AsyncClient) -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": 0, "return_token_ids": True}
    tree = await complete(client, PROMPT, **fields)
    (choice,) = tree["choices"]
    assert choice["text"] == PROMPT
    assert "".join(choice["logprobs"]["tokens"][1:]) == PROMPT
    assert (choice["finish_reason"], choice["token_ids"], tree["usage"]["completion_tokens"]) == ("length", [], 0)
    events = await streamed(client, PROMPT, **fields, stream_options={"include_usage": True})
    assert joined(events) == PROMPT
    assert events[-1]["usage"] == tree["usage"]
    assert [event["choices"][0].get("finish_reason") for event in events[:-1]] == [None, "length"]


async def test_vllm_fields_have_an_effect(client: httpx.AsyncClient) -> None:
    tree = await complete(client, allowed_token_ids=[259], min_tokens=3, return_token_ids=True)
    assert tree["choices"][0]["token_ids"] == [259] * 8
    tree = await complete(client, stop=[" the", "."], include_stop_str_in_output=True, max_tokens=200, temperature=0)
    assert tree["choices"][0]["finish_reason"] == "stop"
    assert tree["choices"][0]["text"].endswith(tree["choices"][0]["stop_reason"])
    tree = await complete(client, "a b c d e f", truncate_prompt_tokens=2)
    assert tree["usage"]["prompt_tokens"] == 2
    biased = await complete(
        client, logit_bias={"259": 100.0}, temperature=0, logprobs=1, return_tokens_as_token_ids=True
    )
    assert set(biased["choices"][0]["logprobs"]["tokens"]) == {"token_id:259"}
    prompt_logprobs = (await complete(client, prompt_logprobs=1))["choices"][0]["prompt_logprobs"]
    assert prompt_logprobs[0] is None
    assert all(len(entries) in (1, 2) for entries in prompt_logprobs[1:])


async def test_metrics_on_request(client: httpx.AsyncClient) -> None:
    tree = await complete(client, return_metrics=True, slo=1000.0)
    assert tree["metrics"]["num_output_tokens"] == 8
    assert tree["metrics"]["slo_met"] is True
    assert 0 < tree["metrics"]["ttft_s"] <= tree["metrics"]["e2e_s"]
    events = await streamed(client, return_metrics=True, slo={"ttft": 1e-9})
    assert events[-1]["metrics"]["slo_met"] is False
    assert "usage" not in events[-1]


async def test_the_names_of_a_request(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/completions", json={"prompt": PROMPT, **SHORT, "tempratur": 1}, headers={"x-request-id": "mine"}
    )
    assert response.json()["id"] == response.headers["x-request-id"] == "cmpl-mine"
    assert "'tempratur' is not known" in response.headers["x-actorllm-warning"]
    assert "'temperature'" in response.headers["x-actorllm-warning"]


async def test_defaults_are_the_authors(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": PROMPT, "seed": 5, "max_tokens": None})
    assert response.json()["usage"]["completion_tokens"] <= 16
    expected = await llm.complete(PROMPT, SamplingParams(seed=5, temperature=0.8, top_p=0.95))
    assert response.json()["choices"][0]["text"] == expected.outputs[0].text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_truncated_prompt_is_echoed_as_the_model_has_seen_it(client: httpx.AsyncClient, stream: bool) -> None:
    """The whole of it may be as long as a body, and stands in each of n choices."""
    asked = {"prompt": "The dog ran. " * 10_000 + PROMPT, "echo": True, "truncate_prompt_tokens": 4}
    if stream:
        text = joined(await streamed(client, **asked))
    else:
        text = (await complete(client, **asked))["choices"][0]["text"]
    assert "upon a time" in text
    assert "dog ran" not in text


async def test_arguments_of_logits_processors_are_taken_and_bounded(client: httpx.AsyncClient) -> None:
    """This engine has no processors, which leaves the text as it is."""
    assert (await complete(client, vllm_xargs={"target": 7}))["choices"] == (await complete(client))["choices"]
    for wrong in (3, {"a": "x" * 70_000}):
        response = await client.post("/v1/completions", json={"prompt": PROMPT, **SHORT, "vllm_xargs": wrong})
        assert response.status_code == 400, response.text
