"""`POST /invocations`: what is in the body says which endpoint answers it. Profiles and the configuration over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from actorllm.server.invocations import endpoint_of
from actorllm.server.text_endpoints import complete, converse
from actorllm.server.vectors import routes
from tests.server.conftest import client_of, events_of

pytestmark = pytest.mark.anyio

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
TALK = [{"role": "user", "content": "Once upon a time"}]
LONG = list(range(10, 700)) * 40
"""Ids of a prompt whose body is too large to be parsed on the loop."""


async def test_a_body_is_answered_as_at_its_own_endpoint(client: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "The fox", **GREEDY}),
        ("/v1/chat/completions", {"messages": TALK, **GREEDY}),
    ):
        answers = [(await client.post(one, json=body)).json() for one in (path, "/invocations")]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["object"] == answers[1]["object"]
    streamed = await client.post("/invocations", json={"prompt": "The fox", **GREEDY, "stream": True})
    assert len(events_of(streamed)) > 1
    cut = {"prompt": LONG, "truncate_prompt_tokens": 8, "return_token_ids": True, **GREEDY}
    assert (await client.post("/invocations", json=cut)).json()["choices"][0]["prompt_token_ids"] == LONG[-8:]
    for body, said in (({"input": "a"}, "one of messages and prompt"), ({"prompt": 3}, "prompt")):
        refused = await client.post("/invocations", json=body)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "tasks", "endpoint"),
    [
        ({"messages": TALK}, ("generate",), converse),
        ({"prompt": "a"}, ("generate",), complete),
        ({"input": "a"}, ("embed", "token_embed"), routes.embeddings),
        ({"messages": TALK}, ("embed", "token_embed"), routes.embeddings),
        ({"input": "a"}, ("classify", "token_classify"), routes.classify),
        ({"input": "a"}, ("token_classify",), routes.pool),
        ({"queries": "a", "documents": ["b"]}, ("embed",), routes.score),
        ({"text_1": "a", "text_2": "b"}, ("classify",), routes.score),
        ({"query": "a", "documents": ["b"]}, ("embed",), routes.rerank),
        ({"data": 1}, ("plugin",), routes.pool),
    ],
)
def test_bodies_find_their_endpoints(body: dict[str, Any], tasks: tuple[str, ...], endpoint: object) -> None:
    assert endpoint_of(body, tasks) is endpoint


async def test_a_profile_is_begun_and_ended_where_the_engine_has_a_folder_for_it(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert (await client.post("/start_profile")).status_code == 404
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    async with (
        AsyncLLM("storyteller", topology="inline", profiler_config=profiler) as engine,
        client_of(create_app(engine)) as profiled,
    ):
        assert (await profiled.post("/start_profile?profile_prefix=a%2Fb")).status_code == 400
        assert (await profiled.post("/start_profile?profile_prefix=mine")).status_code == 200
        assert (await profiled.post("/v1/completions", json={"prompt": "a", **GREEDY})).status_code == 200
        assert (await profiled.post("/stop_profile")).status_code == 200
        assert (await profiled.post("/stop_profile")).status_code == 503
    assert [name.startswith("mine") for name in os.listdir(tmp_path)] == [True]


async def test_the_configuration_is_told_to_developers(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    async with client_of(create_app(llm, enable_dev_endpoints=True)) as client:
        text = (await client.get("/server_info")).json()
        assert "max_model_len=1024" in text["vllm_config"]
        assert text["vllm_env"]["VLLM_LOGGING_LEVEL"] == "INFO"
        assert "secret" not in str(text)
        tree = (await client.get("/server_info?config_format=json")).json()
        assert tree["vllm_config"]["model"]["max_model_len"] == 1024
        refused = await client.get("/server_info?config_format=xml")
        assert (refused.status_code, "config_format='xml'" in refused.text) == (400, True)
