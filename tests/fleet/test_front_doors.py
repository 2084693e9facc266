"""A fleet behind the server and behind `LLM`: what their users see of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actorllm import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from actorllm.cli.commands import ps
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import CorruptModelError
from actorllm.server.app import create_app

TWO = {"data_parallel_size": 2, "ready_replicas": 2}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncLLM("storyteller", data_parallel_size=2, ready_replicas=2, num_threads=1) as llm:
        transport = httpx.ASGITransport(app=create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
            yield client


@pytest.mark.anyio
async def test_a_server_shows_every_replica(client: httpx.AsyncClient) -> None:
    answers: list[Any] = []

    async def ask(number: int) -> None:
        body = {"prompt": f"Number {number}", "max_tokens": 8, "seed": number}
        answers.append((await client.post("/v1/completions", json=body)).raise_for_status().json())

    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(ask, number)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [8] * 6
    text = (await client.get("/metrics")).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    per_replica = {
        sample.labels["engine"]: sample.value for sample in samples if sample.name == "vllm:generation_tokens_total"
    }
    assert set(per_replica) == {"0", "1"}
    assert all(per_replica.values()), "requests that come together are shared out"
    (total,) = [sample.value for sample in samples if sample.name == "actorllm:generation_tokens_total"]
    assert total == sum(per_replica.values()) == 48
    live = (await client.get("/live")).raise_for_status().json()
    assert (live["state"], live["engine"]["counts"]["num_output_tokens"]) == ("running", 48)
    steps = live["engine"]["steps"]
    assert {replica for *_, replica in steps} == {0, 1}, "those of all replicas, and of which"
    known = {replica: step - 1 for step, *_, replica in steps}
    text = ",".join(f"{replica}.{step}" for replica, step in known.items())
    newest = (await client.get(f"/live?after={text}")).json()["engine"]["steps"]
    assert sorted((step, replica) for step, *_, replica in newest) == sorted((n + 1, r) for r, n in known.items())
    assert (await client.get("/live?after=0.1,x")).status_code == 400
    assert (await client.get("/health")).status_code == 200


def test_llm_uses_every_replica() -> None:
    params = [SamplingParams(max_tokens=8, seed=seed, temperature=0.7) for seed in range(8)]
    prompts = [f"Once upon a time, number {number}" for number in range(8)]
    with LLM("storyteller", dtype="float32", num_threads=1) as one:
        wanted = [output.outputs[0].text for output in one.generate(prompts, params, use_tqdm=False)]
    with LLM("storyteller", dtype="float32", num_threads=1, data_parallel_size=2, ready_replicas=2) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].text for output in found] == wanted
        stats = llm.stats()
        assert all(one["scheduler"]["num_output_tokens"] for one in stats["scheduler"]["replicas"].values())
        labels = {metric.labels.get("engine") for metric in llm.get_metrics() if metric.name.startswith("vllm:")}
        assert labels == {"0", "1"}
        llm.scale(1)
        assert [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)] == wanted


@pytest.mark.anyio
async def test_beams_profiles_and_listings_are_those_of_a_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beams are the same wherever their steps run; each replica writes a profile; `actorllm ps` counts replicas and requests."""
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    async with AsyncLLM("storyteller", dtype="float32", num_threads=1) as one:
        wanted = await last_of(one.beam_search("Once upon a time", params=beams))
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    options: dict[str, Any] = {"name": "listed", "router": "round-robin", "profiler_config": profiler}
    async with AsyncLLM("storyteller", dtype="float32", num_threads=1, **TWO, **options) as llm:
        found = await last_of(llm.beam_search("Once upon a time", params=beams))
        assert [one.token_ids for one in found.outputs] == [one.token_ids for one in wanted.outputs]
        routed = llm._engine.statistics()["frontend"]["num_routed"]
        assert min(routed[0], routed[1]) > 2, "beams are on both replicas"
        await llm.start_profile("mine")
        streams = [
            llm.generate("Once", SamplingParams(max_tokens=400, ignore_eos=True), data_parallel_rank=n) for n in (0, 1)
        ]
        for stream in streams:
            await anext(stream)
        ps(json=True)
        (listed,) = [engine for engine in orjson.loads(capsys.readouterr().out) if engine["name"] == "listed"]
        assert (listed["num_replicas"], listed["num_running"], listed["state"]) == (2, 2, "running")
        ps()
        assert "REPLICAS" in capsys.readouterr().out
        for stream in streams:
            stream.abort()
            async for _ in stream:
                pass
        await llm.stop_profile()
    names = sorted(os.listdir(tmp_path))
    assert names == ["mine_replica0_rank0.json", "mine_replica1_rank0.json"]


async def last_of(stream: AsyncIterator[Any]) -> Any:
    *_, last = [output async for output in stream]
    return last


def test_a_start_that_fails_everywhere_is_told(tmp_path: Path) -> None:
    """With the error of a replica; nothing is tried again behind it."""
    folder = tmp_path / "broken"
    shutil.copytree(BUNDLED_MODELS["storyteller"], folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(CorruptModelError, match="cannot be read"):
        LLM(folder, data_parallel_size=2).generate("x", use_tqdm=False)
