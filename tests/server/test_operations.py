"""Models, health, tokens, and what an operator asks for; the application inside of another one."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
from fastapi import FastAPI

import actorllm
from actorllm import AsyncLLM
from actorllm.errors import ConfigError
from actorllm.server import create_app
from actorllm.text.tokenizer import Tokenizer
from tests.server.conftest import client_of, is_idle, until

pytestmark = pytest.mark.anyio

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "min_tokens": 900}


async def test_models(llm: AsyncLLM) -> None:
    async with client_of(create_app(llm, served_model_name=["a", "org/b"])) as client:
        tree = (await client.get("/v1/models")).json()
        assert [card["id"] for card in tree["data"]] == ["a", "org/b"]
        assert tree["data"][0]["root"] == "storyteller"
        assert tree["data"][0]["max_model_len"] == 1024
        assert (await client.get("/v1/models/org/b")).json() == tree["data"][1]
        body = {"prompt": "a", "max_tokens": 1}
        assert (await client.post("/v1/completions", json={**body, "model": "org/b"})).json()["model"] == "org/b"
        assert (await client.post("/v1/completions", json=body)).json()["model"] == "a"
        assert (await client.post("/v1/completions", json={**body, "model": "storyteller"})).status_code == 404


async def test_health_and_version(client: httpx.AsyncClient) -> None:
    for response in (await client.get("/health"), await client.get("/ping"), await client.post("/ping")):
        assert response.status_code == 200
    assert (await client.get("/version")).json() == {"version": actorllm.__version__}
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_an_engine_that_has_ended_is_unhealthy() -> None:
    llm = AsyncLLM("storyteller", topology="inline")
    async with client_of(create_app(llm)) as client:
        assert (await client.get("/health")).status_code == 200  # it starts with the first request
        llm.shutdown()
        for response in (
            await client.get("/health"),
            await client.post("/v1/completions", json={"prompt": "a"}),
            await client.post("/v1/completions", json={"prompt": "a", "stream": True}),
        ):
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["type"] == "ServiceUnavailableError"


async def test_an_engine_that_has_died_is_unhealthy_and_says_of_what() -> None:
    llm = AsyncLLM("storyteller", num_threads=1, on_failure="raise")
    try:
        async with client_of(create_app(llm)) as client:
            body = {"prompt": "a", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
            while not llm.errored:
                await anyio.sleep(0.005)
            for response in (await client.get("/health"), await client.post("/v1/completions", json=body)):
                assert response.status_code == 503
                assert "worker0 was killed by signal 9 (SIGKILL)" in response.json()["error"]["message"]
    finally:
        llm.shutdown()


async def test_tokens_there_and_back(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    text = "Once upon a time — 狗"
    tree = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert tree["tokens"] == Tokenizer(llm.config.model.path).encode(text).tolist()
    assert tree["count"] == len(tree["tokens"]) == len(tree["token_strs"])
    as_in_the_vocabulary = json.loads((Path(llm.config.model.path) / "tokenizer.json").read_text())["model"]["vocab"]
    assert [as_in_the_vocabulary[one] for one in tree["token_strs"][1:]] == tree["tokens"][1:]
    assert tree["token_strs"][0] == "<|endoftext|>"
    assert tree["max_model_len"] == 1024
    bare = (await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert bare["tokens"] == tree["tokens"][1:]
    assert (await client.post("/detokenize", json={"tokens": bare["tokens"]})).json() == {"prompt": text}
    messages = [{"role": "user", "content": "Once"}]
    as_chat = (await client.post("/tokenize", json={"messages": messages})).json()
    answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert as_chat["count"] == answer.json()["usage"]["prompt_tokens"]
    assert (await client.get("/tokenizer_info")).json()["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a" * 5_000_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**12]}, "tokens"),
        ("/abort_requests", {}, "request_ids"),
        ("/generate", {}, "prompt"),
        ("/generate", {"prompt": ""}, "prompt"),
        ("/generate", {"prompt": "a", "max_token": 4}, "max_token"),
        ("/generate", {"prompt": "a", "temperature": -4}, "temperature"),
        ("/generate", {"prompt": "a " * 4000}, "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_bodies(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


async def test_abort_by_id_answers_with_what_there_is(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    answers: dict[str, httpx.Response] = {}

    async def complete(name: str) -> None:
        answers[name] = await client.post("/v1/completions", json={**LONG, "request_id": name})

    async with anyio.create_task_group() as group:
        for name in ("first", "second"):
            group.start_soon(complete, name)

        async def both_run() -> bool:
            return bool((await llm.stats())["scheduler"]["scheduler"]["num_running"] == 2)

        await until(both_run)
        told = await client.post("/abort_requests", json={"request_ids": ["cmpl-first", "nobody"]})
        assert told.json() == {"num_aborted": 1}
        await until(lambda: _has(answers, "first"))
        assert answers["first"].json()["choices"][0]["finish_reason"] == "abort"
        assert (await client.post("/abort_requests", json={"abort_all": True})).json() == {"num_aborted": 1}
    assert answers["second"].json()["choices"][0]["finish_reason"] == "abort"
    await until(lambda: is_idle(llm))


async def _has(answers: dict[str, Any], name: str) -> bool:
    return name in answers


async def test_reset_prefix_cache(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    body = {"prompt": "The dog ran to the park. " * 20, "max_tokens": 1}

    async def num_cached() -> int:
        tree = (await client.post("/v1/completions", json=body)).json()
        return int(tree["usage"]["prompt_tokens_details"]["cached_tokens"])

    await num_cached()
    assert await num_cached() > 0
    assert (await client.post("/reset_prefix_cache?reset_running_requests=true")).json() == {"reset": True}
    assert await num_cached() == 0
    assert (await client.post("/reset_prefix_cache?reset_running_requests=maybe")).status_code == 400


async def test_the_demo_servers_generate(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Once upon", "max_tokens": 5, "temperature": 0, "slo": 0.05, "is_latency_sensitive": "True"}
    whole = (await client.post("/generate", json=body)).json()
    (text,) = whole["text"]
    assert text.startswith("Once upon a time")
    response = await client.post("/generate", json={**body, "stream": True})
    lines = [orjson.loads(line) for line in response.content.splitlines()]
    assert lines[-1] == whole
    assert all(text.startswith(line["text"][0]) for line in lines)
    several = (await client.post("/generate", json={**body, "n": 3, "temperature": 1.0})).json()
    assert len(several["text"]) == 3


async def test_mounted_into_another_application(llm: AsyncLLM) -> None:
    outer = FastAPI()
    outer.mount("/llm", create_app(llm, api_key="key"))
    async with client_of(outer) as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/v1/models")).status_code == 401
        headers = {"authorization": "Bearer key"}
        response = await client.post("/llm/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        assert response.json()["usage"]["completion_tokens"] == 1
        assert (await client.get("/llm/nothing", headers=headers)).json()["error"]["code"] == 404


async def test_browsers_of_other_origins(llm: AsyncLLM) -> None:
    origin = {"origin": "https://example.org"}
    async with client_of(create_app(llm, api_key="key", allowed_origins=["https://example.org"])) as client:
        response = await client.options("/v1/completions", headers={**origin, "access-control-request-method": "POST"})
        assert response.headers["access-control-allow-origin"] == "https://example.org"
        refused = await client.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://example.org"
    async with client_of(create_app(llm)) as client:
        assert "access-control-allow-origin" not in (await client.get("/health", headers=origin)).headers


async def test_the_openapi_document_has_every_body(client: httpx.AsyncClient) -> None:
    tree = (await client.get("/openapi.json")).json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/generate"):
        reference = tree["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.rpartition("/")[2] in tree["components"]["schemas"]
    chat = tree["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["required"] == ["messages"]
    assert "is_latency_sensitive" in chat["properties"]


@pytest.mark.parametrize(
    "arguments",
    [{"served_model_name": ""}, {"api_key": [""]}, {"max_body_bytes": 0}, {"max_concurrent_requests": 0}],
    ids=str,
)
def test_bad_arguments(llm: AsyncLLM, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        create_app(llm, **arguments)


async def test_the_live_page_and_what_it_asks(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    parts = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert len(parts) == 3
    answers = [page, *[await client.get(f"/{part}") for part in parts]]
    for answer in answers:
        assert answer.status_code == 200
        assert "'unsafe-inline'" not in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in answer.text, "what clients name and write must stay text"
    assert "style=" not in page.text, "the policy refuses it"
    assert not re.search(r"<script>|<style>|\son\w+=", page.text), "the policy refuses it"
    asked = set(re.findall(r'\$\("([\w-]+)"\)', "".join(answer.text for answer in answers)))
    assert asked <= set(re.findall(r'id="([\w-]+)"', page.text))
    assert (await client.get("/page/index.html")).status_code == 404
    async with anyio.create_task_group() as group:
        group.start_soon(_complete, client, {**LONG, "slo": {"tpot": 10.0}, "tenant": "a", "request_id": "tale"})

        async def has_begun() -> bool:
            engine = (await client.get("/live")).json()["engine"]
            return any(request["num_output"] > 0 for request in engine["requests"]["running"])

        await until(has_begun)
        tree = (await client.get("/live")).json()
        (request,) = tree["engine"]["requests"]["running"]
        assert (request["state"], request["tenant"], request["max_tokens"]) == ("running", "a", 900)
        assert request["slo"][:3] == [None, 10.0, None]
        assert request["name"] == "cmpl-tale"
        assert 0 < request["ttft_s"] <= request["age_s"]
        assert tree["engine"]["requests"]["waiting"] == []
        assert tree["engine"]["kv_usage"] > 0
        steps = tree["engine"]["steps"]
        newer = (await client.get(f"/live?after={steps[-1][0]}")).json()["engine"]["steps"]
        assert all(step[0] > steps[-1][0] for step in newer)
        assert (tree["model"], tree["state"], tree["num_api_processes"]) == ("storyteller", "running", 1)
        await client.post("/abort_requests", json={"request_ids": [request["name"]]})
    for after in ("x", "-1", "1" * 30):
        assert (await client.get(f"/live?after={after}")).status_code == 400


async def _complete(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    await client.post("/v1/completions", json=body)


async def test_looking_at_an_engine_does_not_start_it() -> None:
    llm = AsyncLLM("storyteller", topology="inline")
    async with client_of(create_app(llm)) as client:
        assert (await client.get("/live")).json()["engine"] is None
    assert not llm.is_running
    llm.shutdown()
