"""`/metrics`: what a scrape says of what the engine did."""

from __future__ import annotations

import re

import httpx
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
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
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["kv_cache_usage_perc"] == 0
    assert "recoveries_total" in after


async def test_it_answers_head_and_starts_nothing() -> None:
    llm = AsyncLLM("storyteller", topology="inline")
    async with client_of(create_app(llm, served_model_name='a"b\\c')) as client:
        assert (await client.head("/metrics")).status_code == 200
        assert (await scrape(client))["recoveries_total"] == 0
    assert not llm.is_running
    llm.shutdown()
