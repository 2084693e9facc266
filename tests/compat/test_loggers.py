"""vLLM's own two loggers, given to an engine by a program."""

from __future__ import annotations

import logging

import prometheus_client
import pytest
from actorllm.compat.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger

from actorllm import AsyncEngineArgs, AsyncLLM, SamplingParams

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.mark.anyio
async def test_lines_and_metrics_of_an_engine(anyio_backend: str, caplog: pytest.LogCaptureFixture) -> None:
    args = AsyncEngineArgs("storyteller", topology="inline", num_threads=1)
    for _ in range(2):  # the second one's metrics replace those of the first
        with caplog.at_level(logging.INFO, "actorllm"):
            async with AsyncLLM.from_engine_args(args, stat_loggers=[LoggingStatLogger, PrometheusStatLogger]) as llm:
                for _ in range(2):
                    await llm.complete("Once upon a time", PARAMS)
                await llm.do_log_stats()
                await llm.do_log_stats()
                await llm.do_log_stats()
    lines = [record.message for record in caplog.records if record.name.endswith("compat.loggers")]
    assert "Engine 000: it has started" in lines[0]
    assert "Avg generation throughput" in lines[1]
    assert 2 <= sum("throughput" in line for line in lines) <= 4  # an idle engine is silent

    def value(name: str, **labels: str) -> float | None:
        labels = {"model_name": "storyteller", "engine": "0", **labels}
        return prometheus_client.REGISTRY.get_sample_value(f"vllm:{name}", labels)

    assert value("generation_tokens_total") == 12
    assert value("request_success_total", finished_reason="length") == 2
    assert value("time_to_first_token_seconds_count") == 2
    assert value("request_generation_tokens_sum") == 12
    assert (value("inter_token_latency_seconds_count") or 0) >= 2
    assert value("num_requests_running") is not None
