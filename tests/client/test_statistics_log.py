"""Lines of throughput and load in the log."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import anyio
import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.client import engine as engine_module
from actorllm.client.statistics_log import StatisticsLog
from actorllm.errors import EngineDeadError
from actorllm.types.engine_metrics import Counter, Gauge, Histogram


def statistics(prompts: int, outputs: int, *, running: int = 0) -> dict[str, Any]:
    cache = {"queries": 4, "hits": 1}
    load = {"num_running": running, "num_waiting": 0, "kv": {"usage": 0.5}, "prefix_cache": cache}
    return {"scheduler": {"num_prefill_tokens": prompts, "num_output_tokens": outputs, **load}}


def test_rates_are_those_since_the_last_line() -> None:
    log = StatisticsLog(100.0)
    assert log.line(statistics(50, 20), 110.0).startswith("prompts: 5.0 tokens/s, outputs: 2.0 tokens/s, running: 0")
    line = log.line(statistics(60, 20, running=3), 112.0)
    assert line == (
        "prompts: 5.0 tokens/s, outputs: 0.0 tokens/s, running: 3 requests, waiting: 0 requests, KV cache: 50.0% in use, "
        "prefix cache: 25.0% found"
    )
    assert log.line(statistics(4, 2), 114.0).startswith("prompts: 2.0 tokens/s, outputs: 1.0"), "it was started again"


async def test_an_idle_engine_is_silent_and_one_that_recovers_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    answers = deque(
        [statistics(0, 0), EngineDeadError("gone"), statistics(8, 1, running=1), statistics(8, 1), statistics(8, 1)]
    )
    asked = anyio.Event()

    async def ask() -> dict[str, Any]:
        if not answers:
            asked.set()
            await anyio.sleep_forever()
        answer = answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    with caplog.at_level(logging.INFO, logger="actorllm"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(StatisticsLog(0.0).report_periodically, ask, 0.001)
            await asked.wait()
            tasks.cancel_scope.cancel()
    assert [line[:10] + line[line.index("running") :][:10] for line in caplog.messages] == [
        "prompts: " + caplog.messages[0][9] + "running: 1",
        "prompts: 0running: 0",
    ]


async def test_an_engine_tells_of_its_load(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "INTERVAL_S", 0.01)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with caplog.at_level(logging.INFO, logger="actorllm.client.statistics_log"):
        async with AsyncLLM("storyteller", topology="inline", num_threads=1, disable_log_stats=False) as llm:
            await llm.complete("Once", params)
            with anyio.fail_after(30):
                while not caplog.messages:
                    await anyio.sleep(0.01)
        assert "running: " in caplog.messages[0]
        caplog.clear()
        async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
            await llm.complete("Once", params)
            assert caplog.messages == []
            await llm.do_log_stats()
        assert len(caplog.messages) == 1
        assert "outputs: 0.0 tokens/s" not in caplog.messages[0]


def test_metrics_are_objects_of_vllms_names() -> None:
    with LLM("storyteller", topology="inline", num_threads=1, max_model_len=128) as llm:
        llm.generate(["Once", "In"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        found = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}
    tokens = found["vllm:generation_tokens", "0", "storyteller"]
    assert isinstance(tokens, Counter)
    assert tokens.value == 10
    running = found["vllm:num_requests_running", "0", "storyteller"]
    assert isinstance(running, Gauge)
    assert running.value == 0
    ended = found["vllm:request_success", "0", "storyteller", "length"]
    assert isinstance(ended, Counter)
    assert ended.value == 2
    first = found["vllm:time_to_first_token_seconds", "0", "storyteller"]
    assert isinstance(first, Histogram)
    assert first.count == first.buckets["+Inf"] == 2
    assert first.sum > 0
    assert ("actorllm:wasted_tokens", "storyteller") in found
