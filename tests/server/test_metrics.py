"""`/metrics`: what a scrape says of what the engine did."""

from __future__ import annotations

import re
import time
from importlib import resources

import httpx
import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from actorllm import AsyncLLM, SamplingParams
from actorllm.client.metric_families import VLLM_NAMES
from actorllm.server import create_app
from actorllm.server.board import Board
from actorllm.server.metrics import render
from tests.server.conftest import client_of

pytestmark = pytest.mark.anyio

SAMPLE = re.compile(
    r'((?:actorllm|vllm):[a-z0-9_]+)\{(?:engine="0",)?model_name="((?:[^"\\]|\\.)*)"(?:,([^}]*))?\} (\S+)'
)


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


OF_VLLM = {  # of vLLM 0.32
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("cache_config_info", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total", "generation_tokens_total"),
    *("request_success_total", "corrupted_requests_total", "iteration_tokens_total", "inter_token_latency_seconds"),
    *("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_num_preemptions"),
    *("request_params_max_tokens", "request_prefill_kv_computed_tokens"),
    *("request_params_n", "request_max_num_generation_tokens"),
}


async def test_the_same_counts_stand_under_the_names_of_vllm(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    prompt = list(range(100, 164))
    for _ in range(2):
        assert (await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})).status_code == 200
    values = await scrape(client)
    of_vllm = {name.removeprefix("vllm:"): value for name, value in values.items() if name.startswith("vllm:")}
    names = {re.sub("_(bucket|sum|count)({.*)?$", "", name).partition("{")[0] for name in of_vllm}
    assert names == OF_VLLM
    differing = {name for name, value in of_vllm.items() if values[name] != value}
    assert differing == {"prompt_tokens_total"}  # those found in the cache are among them, as in vLLM
    assert of_vllm["prompt_tokens_total"] == values["prompt_tokens_total"] + values["prefix_cache_hits_total"]
    assert values["prefix_cache_hits_total"] > 0
    text = (await client.get("/metrics")).text
    assert 'vllm:num_requests_waiting{engine="0",model_name="storyteller"} 0.0\n' in text
    async with client_of(create_app(llm, vllm_metrics=False)) as other:
        assert "vllm:" not in (await other.get("/metrics")).text


async def test_a_request_of_several_sequences_counts_once(llm: AsyncLLM, client: httpx.AsyncClient) -> None:
    before = await scrape(client)
    for n in (1, 3):
        body = {"prompt": [1, 2, 3], "n": n, "max_tokens": 4, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    grown = {name: value - before.get(name, 0) for name, value in (await scrape(client)).items()}
    assert (grown["request_params_n_count"], grown["request_params_n_sum"]) == (2, 4)
    assert grown["request_max_num_generation_tokens_count"] == 2
    assert grown["request_max_num_generation_tokens_sum"] == 8
    assert grown["request_generation_tokens_count"] == 4


async def test_open_metrics_on_demand(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2})).status_code == 200
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    response = await client.get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["actorllm:generation_tokens"].type == "counter"
    samples = families["vllm:generation_tokens"].samples
    assert [(sample.name, sample.labels) for sample in samples] == [
        ("vllm:generation_tokens_total", {"model_name": "storyteller", "engine": "0"})
    ]
    of_every_engine = {name for name in VLLM_NAMES if not name.startswith("spec_decode")}  # this one drafts nothing
    assert {f"vllm:{name}" for name in of_every_engine} <= set(families)
    assert (await scrape(client))["generation_tokens_total"] == samples[0].value


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
