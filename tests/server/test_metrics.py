"""`/metrics`: what a scrape says of what the engine did."""

from __future__ import annotations

import re
import time
from importlib import resources

import httpx
import orjson
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.server import create_app
from actorllm.server.board import Board
from actorllm.server.metrics import render
from tests.server.conftest import client_of

pytestmark = pytest.mark.anyio

SAMPLE = re.compile(r'(actorllm:[a-z0-9_]+)\{model_name="((?:[^"\\]|\\.)*)"(?:,([^}]*))?\} (\S+)')


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    """Values by name and labels. Every line is checked against the format."""
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values: dict[str, float] = {}
    typed: dict[str, str] = {}
    for line in response.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in typed
            typed[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.fullmatch(line)
            assert found, line
            name, _, labels, value = found.groups()
            base = re.sub("_(bucket|sum|count)$", "", name)
            assert name in typed or base in typed, line
            values[f"{name.removeprefix('actorllm:')}{{{labels}}}" if labels else name.removeprefix("actorllm:")] = (
                float(value)
            )
    return values


async def test_a_scrape_counts_what_was_done(client: httpx.AsyncClient) -> None:
    before = await scrape(client)
    body = {"prompt": [1, 2, 3], "n": 2, "max_tokens": 5, "ignore_eos": True}
    for slo in (1000.0, {"ttft": 1e-9}, None):
        response = await client.post("/v1/completions", json={**body, "slo": slo})
        assert response.status_code == 200
    after = await scrape(client)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['request_success_total{finished_reason="length"}'] == 6
    assert grown["generation_tokens_total"] == 30
    assert grown["slo_requests_total"] == 4
    assert grown['slo_attained_total{reading="tpot"}'] == 2
    assert grown['slo_attained_total{reading="deadline"}'] == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
        assert grown[f"{name}_count"] == grown[f'{name}_bucket{{le="+Inf"}}'] == 6
    assert grown['request_generation_tokens_bucket{le="5.0"}'] == 6
    assert grown['request_generation_tokens_bucket{le="2.0"}'] == 0
    assert grown["request_generation_tokens_sum"] == 30
    assert grown["request_prompt_tokens_sum"] == 18
    assert 0 < grown["time_to_first_token_seconds_sum"] <= grown["e2e_request_latency_seconds_sum"]
    parts = [grown[f"request_{part}_time_seconds_sum"] for part in ("intake", "queue", "prefill")]
    assert sum(parts) == pytest.approx(grown["time_to_first_token_seconds_sum"])
    assert min(parts) > 0
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after['num_requests_waiting_by_reason{reason="capacity"}'] == 0
    assert after['num_requests_waiting_by_reason{reason="deferred"}'] == 0
    assert grown['prompt_tokens_by_source_total{source="local_compute"}'] == grown["prompt_tokens_total"]
    assert after["kv_cache_usage_perc"] == 0
    assert "recoveries_total" in after


async def test_what_comes_before_the_scheduler_is_no_queue_time(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    before = await scrape(client)
    params = SamplingParams(max_tokens=1)
    output = await llm.complete("Once", params, arrival_time=time.time() - 1000)
    after = await scrape(client)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.intake_time is not None
    assert metrics.queue_time is not None
    assert metrics.intake_time >= 1000 > metrics.queue_time >= 0
    assert metrics.time_in_queue == pytest.approx(metrics.intake_time + metrics.queue_time)
    names = [f"request_{part}_time_seconds_sum" for part in ("intake", "queue")]
    intake, queue = [after[name] - before.get(name, 0) for name in names]
    assert intake >= 1000 > queue


async def test_it_answers_head_and_starts_nothing() -> None:
    llm = AsyncLLM("storyteller", topology="inline")
    async with client_of(create_app(llm, served_model_name='a"b\\c')) as client:
        assert (await client.head("/metrics")).status_code == 200
        assert (await scrape(client))["recoveries_total"] == 0
    assert not llm.is_running
    llm.shutdown()


def test_what_only_the_owner_counts_is_left_out_and_not_zero_where_it_does_not_answer() -> None:
    lag = Board(1).lag()
    attached = {"supervisor": {"phase": "attached"}, "scheduler": None}
    assert b"recover" not in render(attached, "m", 10, lag)
    owned = {"supervisor": {"num_recoveries": 3, "recovery_s": 0.5}, "scheduler": None}
    assert b'actorllm:recoveries_total{model_name="m"} 3.0\n' in render(owned, "m", 10, lag)


async def test_the_dashboard_shows_what_there_is(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 3})
    known = {re.split("{", name)[0] for name in await scrape(client)}
    dashboard = orjson.loads((resources.files("actorllm.server") / "grafana.json").read_bytes())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["name"] == "model"
    ]
    shown = {name for query in queries for name in re.findall(r"actorllm:(\w+)", query)}
    assert len(shown) > 20
    assert shown <= known, shown - known
    labels = {name for query in queries for name in re.findall(r"by \((\w+)\)", query)} - {"le"}
    text = (await client.get("/metrics")).text
    assert all(f"{label}=" in text for label in labels)


async def test_steps_and_rings(client: httpx.AsyncClient) -> None:
    before = await scrape(client)
    body = {"prompt": list(range(1, 41)), "max_tokens": 6, "ignore_eos": True, "min_tokens": 6}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    after = await scrape(client)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["iteration_tokens_total_count"] == grown["step_duration_seconds_count"] >= 6
    assert grown["iteration_tokens_total_sum"] >= 45
    assert grown["inter_token_latency_seconds_count"] >= 5
    assert grown["request_params_max_tokens_sum"] == 6
    assert grown["request_prefill_kv_computed_tokens_sum"] == 40
    assert {name for name in after if name.startswith("link_fill_perc")} == {
        f'link_fill_perc{{peer="{peer}",direction="{direction}"}}'
        for peer in ("frontend", "workers")
        for direction in ("sent", "received")
    }
