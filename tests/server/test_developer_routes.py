"""The endpoints of `--enable-dev-endpoints` and $VLLM_SERVER_DEV_MODE; without these, they are not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file

from actorllm import AsyncLLM
from actorllm.errors import ConfigError
from actorllm.server import create_app
from actorllm.server.developer_routes import check_processes
from tests.api import worker_functions
from tests.model.updates.weight_folders import ENGINE, changed, write
from tests.server.conftest import client_of, events_of

pytestmark = pytest.mark.anyio

HERE = worker_functions.__name__
BODY: dict[str, Any] = {"prompt": "dog", "max_tokens": 4, "temperature": 0}


@pytest.fixture
async def sleeper() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM("storyteller", topology="inline", enable_sleep_mode=True, **ENGINE) as engine:
        yield engine


async def test_an_engine_sleeps_pauses_calls_and_changes(sleeper: AsyncLLM, tmp_path: Path) -> None:
    async with client_of(create_app(sleeper, enable_dev_endpoints=True, api_key="k")) as client:
        assert (await client.post("/sleep")).status_code == 401, "the guards of the server count"
        client.headers["authorization"] = "Bearer k"
        first = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        told = await client.post("/sleep?level=2&mode=abort&requests=refuse")
        assert (told.status_code, told.json()["freed_bytes"] >= 0) == (200, True)
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        assert (await client.post("/wake_up?tags=weights")).json() == {"is_sleeping": True}
        assert (await client.post("/wake_up?tags=kv_cache")).json() == {"is_sleeping": False}
        assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == first
        for path, said in {
            "/sleep?level=3": "level='3'",
            "/sleep?mode=x": "mode='x'",
            "/wake_up?tags=x": "'x'",
        }.items():
            refused = await client.post(path)
            assert (refused.status_code, said in refused.text) == (400, True), refused.text

        assert (await client.post("/pause?mode=keep")).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert (await client.post("/resume")).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": False}

        call = {"method": f"{HERE}:echo", "args": [1], "kwargs": {"a": None}, "timeout": 60}
        (result,) = (await client.post("/collective_rpc", json=call)).json()["results"]
        assert result == {"rank": 0, "replica": 0, "args": [1], "kwargs": {"a": None}}
        for method, status in ((f"{HERE}:many_bytes", 500), (f"{HERE}:tensor", 400), ("a b", 400)):
            assert (await client.post("/collective_rpc", json={"method": method})).status_code == status

        told = await client.post("/set_policy", json={"scheduling_policy": "edf"})
        assert told.json() == {"scheduling_policy": "edf", "admission_policy": None}
        assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == first
        for wrong, said in (({"scheduling_policy": "edg"}, "did you mean 'edf'"), ({}, "set_policy() needs")):
            refused = await client.post("/set_policy", json=wrong)
            assert (refused.status_code, said in refused.text) == (400, True), refused.text

        assert (await client.get("/get_weight_version")).json() == {"weight_version": "0"}
        assert (await client.get("/get_world_size")).json() == {"world_size": 1}
        body = {"folder": str(write(tmp_path / "one", changed(1))), "version": "one", "running": "keep"}
        assert (await client.post("/update_weights_from_disk", json=body)).json() == {"weight_version": "one"}
        assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] != first
        assert (await client.post("/update_weight_version", json={"new_version": "two"})).status_code == 200
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "two"}
        refused = await client.post("/update_weights_from_disk", json={"folder": "/nowhere"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "folder")


async def test_they_are_there_only_where_they_are_asked_for(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, status in (("", 404), ("0", 404), ("1", 200)):
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", value)
        async with client_of(create_app(llm)) as client:
            assert (await client.get("/is_sleeping")).status_code == status
    with pytest.raises(ConfigError, match="--api-processes 2: the endpoints"):
        check_processes(2, False)
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")
    with pytest.raises(ConfigError, match="--api-processes 2: the endpoints of --enable-dev-endpoints"):
        check_processes(2, True)
    check_processes(1, True)
    check_processes(2, False)


async def test_weights_come_in_parts_by_the_verbs_of_vllm(sleeper: AsyncLLM, tmp_path: Path) -> None:
    """As files, of which the trainer may write one after the other, and take it away when the answer is there."""
    tensors, part = list(changed(2).items()), tmp_path / "part.safetensors"
    async with client_of(create_app(sleeper, enable_dev_endpoints=True)) as client:

        async def post(path: str, **body: Any) -> tuple[int, dict[str, Any]]:
            answer = await client.post(path, json=body) if body else await client.post(path)
            return answer.status_code, answer.json()

        first = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        status, told = await post("/update_weights", update_info={"files": [str(part)]})
        assert (status, "call start_weight_update first" in told["error"]["message"]) == (400, True)
        assert (await post("/init_weight_transfer_engine", init_info={"backend": "nccl"}))[0] == 400
        assert (await post("/init_weight_transfer_engine", init_info={}))[0] == 200
        status, told = await post("/start_weight_update", is_checkpoint_format=False)
        assert (status, told["error"]["param"]) == (400, "is_checkpoint_format"), told
        assert (await post("/start_weight_update", is_checkpoint_format=True))[0] == 200
        assert (await post("/start_weight_update"))[0] == 200
        for half in (tensors[::2], tensors[1::2]):
            save_file(dict(half), part)
            assert (await post("/update_weights", update_info={"files": [str(part)]}))[0] == 200
            part.unlink()
        status, told = await post("/update_weights", update_info={"files": [str(part)]})
        assert (status, told["error"]["param"]) == (400, "update_info"), told
        part.write_bytes(b"none")
        assert (await post("/update_weights", update_info={"files": [str(part)]}))[0] == 400
        assert await post("/finish_weight_update", weight_version="parts") == (200, {"weight_version": "parts"})
        text = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        assert text != first
        assert (await post("/finish_weight_update"))[0] == 400
        assert (await post("/shutdown_weight_transfer_engine"))[0] == 200
        body = {"folder": str(write(tmp_path / "whole", changed(2)))}
        assert (await client.post("/update_weights_from_disk", json=body)).status_code == 200
        assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == text


async def test_weights_that_do_not_fit_are_a_mistake_of_the_client(sleeper: AsyncLLM, tmp_path: Path) -> None:
    """A server that says that it failed itself is asked again, and says then that no update was started."""
    folder = write(tmp_path / "wrong", {**changed(1), "model.norm.weight": torch.ones(3)})
    async with client_of(create_app(sleeper, enable_dev_endpoints=True)) as client:
        await client.post("/start_weight_update")
        body = {"update_info": {"files": [str(folder / "model.safetensors")]}}
        assert (await client.post("/update_weights", json=body)).status_code == 200
        finished = await client.post("/finish_weight_update")
        read = await client.post("/update_weights_from_disk", json={"folder": str(folder)})
        for refused in (finished, read):
            assert (refused.status_code, "has shape (3,)" in refused.text) == (400, True), refused.text
        assert (await client.get("/weight_info")).json() == {"weight_version": "0"}


async def test_the_ranks_are_counted(monkeypatch: pytest.MonkeyPatch, sleeper: AsyncLLM) -> None:
    monkeypatch.setattr(sleeper._engine, "config", replace(sleeper._engine.config, data_parallel_size=3))
    async with client_of(create_app(sleeper, enable_dev_endpoints=True)) as client:
        for query, said in (("", 3), ("?include_dp=true", 3), ("?include_dp=False", 1)):
            assert (await client.get(f"/get_world_size{query}")).json() == {"world_size": said}
        assert (await client.get("/get_world_size?include_dp=x")).status_code == 400


async def test_answers_with_token_ids_tell_which_weights_sampled_them(sleeper: AsyncLLM, tmp_path: Path) -> None:
    """A trainer may bring new weights in the middle of an answer. Each protocol that tells ids, whole and as a stream."""
    folder = str(write(tmp_path / "one", changed(1)))
    many: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "dog", "return_token_ids": True, **many},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "dog"}], "return_token_ids": True, **many},
        "/inference/v1/generate": {"token_ids": [10, 11], "sampling_params": many},
    }
    ends: list[tuple[list[int], dict[str, Any]]] = []
    async with client_of(create_app(sleeper, enable_dev_endpoints=True)) as client:

        async def ask(path: str, body: dict[str, Any]) -> None:
            answer = await client.post(path, json=body)
            trees = events_of(answer) if body["stream"] else [answer.json()]
            choices = [choice for tree in trees for choice in tree["choices"]]
            assert ["weight_versions" in choice for choice in choices] == [False] * (len(choices) - 1) + [True]
            ends.append(([i for choice in choices for i in choice.get("token_ids") or ()], choices[-1]))

        async def count(name: str) -> int:
            return int((await sleeper.stats())["scheduler"]["scheduler"][name])

        await sleeper.pause_generation(mode="keep")  # so that none has ended before the last one begins
        async with anyio.create_task_group() as tasks:
            for path, body in asked.items():
                for is_streamed in (False, True):
                    tasks.start_soon(ask, path, {**body, "stream": is_streamed})
            while await count("num_waiting") < 6:
                await anyio.sleep(0.001)
            before = await count("num_output_tokens")
            await sleeper.resume_generation()
            while await count("num_output_tokens") < before + 6:
                await anyio.sleep(0.001)
            await sleeper.pause_generation(mode="keep")
            await sleeper.update_weights_from_disk(folder, version="one")
            await sleeper.resume_generation()
    spans = [last["weight_versions"] for _, last in ends]
    assert [len(ids) for ids, _ in ends] == [one[-1]["end"] for one in spans] == [200] * 6
    assert {one[-1]["version"] for one in spans} == {"one"}
    begun = [one for one in spans if len(one) == 2]  # the others had no token yet
    assert begun
    for old, new in begun:
        assert (old["version"], old["start"], old["end"]) == ("0", 0, new["start"])
