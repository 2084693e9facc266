"""Loggers that a program brings by vLLM's interface: `stat_loggers=` of engines for async programs and of `LLMEngine`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from actorllm.compat.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerBase
from actorllm.compat.v1.metrics.stats import IterationStats, SchedulerStats

from actorllm import AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from actorllm.errors import ConfigError

QUICK: dict[str, Any] = {"num_threads": 1, "dtype": "float32"}
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


class Kept(StatLoggerBase):
    """Keeps what it is told. Each test has its own list of those that were made."""

    made: list[Kept]

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.config, self.engine_index = vllm_config, engine_index
        self.scheduler: list[SchedulerStats] = []
        self.iterations: list[IterationStats] = []
        self.calls: list[str] = []
        self.made.append(self)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        assert mm_cache_stats is None
        assert self.engine_index in (engine_idx, [engine_idx])
        self.scheduler.append(scheduler_stats)
        if iteration_stats is not None:
            self.iterations.append(iteration_stats)

    def log_engine_initialized(self) -> None:
        self.calls.append("initialized")

    def log(self) -> None:
        self.calls.append("log")


@pytest.fixture
def kept() -> type[Kept]:
    class Own(Kept):
        made: list[Kept] = []  # noqa: RUF012 - of this test

    return Own


def check(one: Kept, num_requests: int) -> None:
    finished = [entry for stats in one.iterations for entry in stats.finished_requests]
    assert [entry.finish_reason for entry in finished] == ["length"] * num_requests
    assert sum(stats.num_generation_tokens for stats in one.iterations) == 9 * num_requests
    assert sum(entry.num_generation_tokens for entry in finished) == 9 * num_requests
    assert sum(stats.num_prompt_tokens for stats in one.iterations) == sum(
        entry.num_prompt_tokens for entry in finished
    )
    assert sum(len(stats.time_to_first_tokens_iter) for stats in one.iterations) == num_requests
    times = [value for stats in one.iterations for value in stats.inter_token_latencies_iter]
    assert all(value >= 0 for value in times)
    for entry in finished:
        assert entry.max_tokens_param == 9
        assert entry.inference_time == pytest.approx(entry.prefill_time + entry.decode_time)
        assert entry.e2e_latency >= entry.queued_time + entry.decode_time
        assert entry.mean_time_per_output_token == pytest.approx(entry.decode_time / 8)
    assert all(isinstance(stats, SchedulerStats) for stats in one.scheduler)


@pytest.mark.parametrize("topology", ["inline", "process"])
async def test_a_logger_is_told_of_tokens_and_ends(kept: type[Kept], topology: str) -> None:
    class Older(kept):  # type: ignore[valid-type,misc]
        """As loggers were written for earlier releases."""

        def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int = 0) -> None:
            super().record(scheduler_stats, iteration_stats, engine_idx=engine_idx)

    class OfAll(kept, AggregateStatLoggerBase):  # type: ignore[valid-type,misc]
        """One for all engines."""

    args = AsyncEngineArgs("storyteller", topology=topology, **QUICK)
    llm = AsyncLLM.from_engine_args(args, stat_loggers=[kept, Older, OfAll])
    async with llm:
        plain = PARAMS.clone()
        plain.output_kind = RequestOutputKind.DELTA
        for prompt in ("Once upon a time", "The king"):
            assert [output async for output in llm.generate(prompt, plain)]
        await llm.do_log_stats()
        assert [one.engine_index for one in kept.made] == [0, 0, [0]]
        for one in kept.made:
            check(one, 2)
            assert one.calls == ["initialized", "log"]
            assert one.config.cache_config.num_blocks > 0
            assert sum(len(stats.inter_token_latencies_iter) for stats in one.iterations) >= 2


def test_a_logger_of_an_engine_that_is_stepped_by_hand(kept: type[Kept]) -> None:
    args = EngineArgs("storyteller", topology="inline", **QUICK)
    engine = LLMEngine.from_engine_args(args, stat_loggers=[kept])
    with engine:
        engine.add_request("a", "Once upon a time", PARAMS)
        engine.add_request("b", "The king", PARAMS)
        while engine.has_unfinished_requests():
            engine.step()
        engine.do_log_stats()
        (one,) = kept.made
        check(one, 2)
        assert one.calls == ["initialized", "log"]
        assert max(stats.num_running_reqs for stats in one.scheduler) == 2
        assert max(stats.kv_cache_usage for stats in one.scheduler) > 0
        assert sum(stats.prefix_cache_stats.queries for stats in one.scheduler) > 0
        assert one.scheduler[-1].num_running_reqs == 0


async def test_a_logger_that_raises_is_left_alone(kept: type[Kept], caplog: pytest.LogCaptureFixture) -> None:
    class Broken(kept):  # type: ignore[valid-type,misc]
        """Raises when it is told something."""

        def record(self, *_: Any, **__: Any) -> None:
            self.calls.append("record")
            raise ZeroDivisionError("no")

    class Unmade(kept):  # type: ignore[valid-type,misc]
        """Raises at once."""

        def __init__(self, *_: Any) -> None:
            raise LookupError("nothing")

    args = AsyncEngineArgs("storyteller", topology="inline", **QUICK)
    with caplog.at_level(logging.ERROR, "actorllm"):
        async with AsyncLLM.from_engine_args(args, stat_loggers=[Unmade, Broken, kept]) as llm:
            for _ in range(2):
                output = await llm.complete("Once upon a time", PARAMS)
                assert len(output.outputs[0].token_ids) == 9
    broken, whole = kept.made
    assert broken.calls == ["initialized", "record"]
    check(whole, 2)
    assert len([record for record in caplog.records if "stat_loggers" in record.message]) == 2


@pytest.mark.parametrize(("given", "told"), [("mine", "must be a list of classes"), ([3], "3 is no class of a logger")])
def test_what_is_no_logger_is_refused_at_once(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        AsyncLLM.from_engine_args(AsyncEngineArgs("storyteller", **QUICK), stat_loggers=given)


@pytest.mark.anyio
async def test_each_replica_has_loggers_and_some_are_of_all(kept: type[Kept]) -> None:
    """Also a replica that comes later, when an engine of one gets others."""
    told: list[tuple[list[int], int, int]] = []

    class Total(AggregateStatLoggerBase):
        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
            self.numbers = engine_indexes

        def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int = 0) -> None:
            if iteration_stats is not None:
                told.append((self.numbers, engine_idx, iteration_stats.num_generation_tokens))

        def log_engine_initialized(self) -> None: ...

    args = AsyncEngineArgs("storyteller", **QUICK)
    async with AsyncLLM.from_engine_args(args, stat_loggers=[kept, Total]) as llm:
        await llm.complete("Once upon a time", PARAMS)
        await llm.scale(2)
        for rank in (0, 1, 1):
            await llm.complete("Once upon a time", PARAMS, data_parallel_rank=rank)
    first, second = kept.made
    assert (first.engine_index, second.engine_index) == (0, 1)
    check(first, 2)
    check(second, 2)
    assert {numbers[0] for numbers, _, _ in told} == {0}
    assert [sum(count for _, at, count in told if at == number) for number in (0, 1)] == [18, 18]
