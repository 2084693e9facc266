"""Open-loop replay: against targets that block, fail and never answer, and against an engine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from actorllm import AsyncLLM
from actorllm.errors import ConfigError, RequestFailedError
from actorllm.scheduling.cost_model import preset
from actorllm.slo.live.embedded import EmbeddedTarget
from actorllm.slo.live.replay import LiveRun, ReplayCall, ReplayRecord, replay
from actorllm.slo.metrics import evaluate
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.timeline import ABORTED, FAILED, FINISHED, UNFINISHED
from actorllm.slo.turns import Turns
from actorllm.slo.workload import (
    Workload,
    assign_classes,
    assign_tenants,
    fixed_lengths,
    make_workload,
    share_prefixes,
)
from actorllm.types.objective import SLO, RequestClass
from tests.slo.report.bench_keys import BENCH_KEYS


class FakeTarget:
    """Answers every request at once."""

    backend = "fake"
    model = "nobody"
    vocab_size = 100
    max_model_len: int | None = None

    def __init__(self) -> None:
        self.calls: list[ReplayCall] = []

    async def prepare(self) -> None: ...

    async def send(self, call: ReplayCall, record: ReplayRecord) -> None:
        self.calls.append(call)
        await self.answer(call, record)

    async def answer(self, call: ReplayCall, record: ReplayRecord) -> None:
        for _ in range(call.max_tokens):
            record.got(1)
            await anyio.lowlevel.checkpoint()


def workload_of(num: int, gap: float = 0.001, num_output: int = 3) -> Workload:
    return make_workload(np.arange(num) * gap, fixed_lengths(num, 8, num_output))


async def test_the_timeline_is_that_of_a_simulation() -> None:
    workload = assign_tenants(workload_of(20), [1, 1])
    ended: list[int] = []
    run = await replay(workload, FakeTarget(), on_end=ended.append)
    assert sorted(ended) == list(range(20))
    assert (run.timeline.outcome == FINISHED).all()
    assert (run.timeline.num_output == 3).all()
    assert (run.timeline.ttft >= 0).all()
    assert (run.lag >= 0).all()
    metrics = run.evaluate(with_fluidity=True)
    assert metrics.summary["completed"] == 20
    assert metrics.summary["total_output_tokens"] == 60
    assert metrics.summary.keys() == evaluate(run.timeline, tenants=workload.tenant_ids).summary.keys()
    assert run.errors == ("",) * 20


async def test_nobody_waits_for_the_answers_of_others() -> None:
    """The first request is answered when the last one was sent."""

    class Waiting(FakeTarget):
        def __init__(self) -> None:
            super().__init__()
            self.all_there = anyio.Event()

        async def answer(self, call: ReplayCall, record: ReplayRecord) -> None:
            if len(self.calls) == 10 + 1:
                self.all_there.set()
            if call.row >= 0:
                await self.all_there.wait()
            await super().answer(call, record)

    target = Waiting()
    run = await replay(workload_of(10), target, num_warmups=1)
    assert (run.timeline.outcome == FINISHED).all()
    assert sorted(call.row for call in target.calls) == [-1, *range(10)]
    assert (run.timeline.first_token >= run.timeline.arrival[9]).all()


async def test_a_late_client_hides_nothing() -> None:
    class Blocking(FakeTarget):
        async def answer(self, call: ReplayCall, record: ReplayRecord) -> None:
            if not call.row:
                time.sleep(0.05)  # noqa: ASYNC251 - the client's loop stands still
            await super().answer(call, record)

    run = await replay(workload_of(5), Blocking(), num_warmups=0)
    assert run.lag[1:].min() > 0.04, "they were due long before"
    assert (run.timeline.ttft >= run.lag).all(), "latency counts from when they were due"
    assert run.timeline.arrival.tolist() == workload_of(5).arrival.tolist()
    assert any("the client was late" in warning for warning in run.warnings)
    figures = run.to_dict()
    assert figures["p99_client_queue_time_ms"] > 40
    assert (
        figures["mean_e2el_including_client_queue_ms"] == figures["mean_e2el_ms"] > figures["mean_client_queue_time_ms"]
    )
    assert run.as_sent().arrival[1] == pytest.approx(run.timeline.arrival[1] + run.lag[1])


async def test_a_request_that_fails_is_a_row() -> None:
    class Failing(FakeTarget):
        async def answer(self, call: ReplayCall, record: ReplayRecord) -> None:
            if call.row == 2:
                record.got(1)
                raise RequestFailedError("out of luck")
            await super().answer(call, record)

    run = await replay(workload_of(5), Failing())
    assert run.timeline.outcome.tolist() == [FINISHED, FINISHED, FAILED, FINISHED, FINISHED]
    assert run.errors[2] == "RequestFailedError: out of luck"
    assert run.timeline.num_output.tolist() == [3, 3, 1, 3, 3]
    assert run.warnings[0].startswith("1 of 5 requests failed, the first with: RequestFailedError: out of luck")
    result = run.to_dict(is_detailed=True)
    assert (result["completed"], result["failed"]) == (4, 1)
    assert result["errors"] == list(run.errors)
    assert [len(gaps) for gaps in result["itls"]] == [2, 2, 0, 2, 2]
    assert result["output_lens"] == [3, 3, 1, 3, 3]
    assert {key for key in result if not key.startswith("actorllm_")} == BENCH_KEYS | {
        f"{figure}_{metric}_ms"
        for figure in ("mean", "median", "std", "p50", "p90", "p95", "p99")
        for metric in ("client_queue_time", "e2el_including_client_queue")
    }
    assert len(result["ttfts"]) == len(result["queue_times"]) == len(result["start_times"]) == 5


async def test_clients_give_up_and_runs_are_cut_off() -> None:
    class Silent(FakeTarget):
        async def answer(self, call: ReplayCall, record: ReplayRecord) -> None:
            record.got(1)
            await anyio.sleep_forever()

    impatient = RequestClass("impatient", patience=0.02)
    workload = assign_classes(workload_of(6), [(impatient, 1.0), (RequestClass("patient"), 1.0)], seed=1)
    assert len(set(workload.class_ids.tolist())) == 2
    run = await replay(workload, Silent(), until=0.1, num_warmups=0)
    expected = [ABORTED if kind == 0 else UNFINISHED for kind in workload.class_ids.tolist()]
    assert run.timeline.outcome.tolist() == expected
    assert run.timeline.num_output.tolist() == [1] * 6
    assert np.isnan(run.timeline.end).tolist() == [outcome == UNFINISHED for outcome in expected]
    assert run.evaluate().worst("tpot") == 0.0
    patient = expected.count(UNFINISHED)
    assert run.warnings[0].startswith(f"{patient} requests were under way when the run was cut off at 0.1 s")


async def test_who_was_not_due_when_the_run_was_cut_off_is_no_failure() -> None:
    early = workload_of(6)
    workload = replace(early, arrival=np.where(np.arange(6) < 3, early.arrival, early.arrival + 1000))
    target = FakeTarget()
    run = await replay(workload, target, until=0.5, num_warmups=0)
    assert run.evaluate().worst("tpot") == 1.0
    assert run.evaluate().summary["failed"] == 0
    assert len(run.workload) == len(run.errors) == len(run.lag) == 3
    assert [call.row for call in target.calls] == [0, 1, 2]
    assert run.warnings[0] == "3 requests were not due before the run was cut off at 0.5 s, and are left out"


async def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    target = FakeTarget()
    target.max_model_len = 10
    with pytest.raises(ConfigError, match=r"5 of 5 requests are longer than the 10 tokens .* longest has 11"):
        await replay(workload_of(5), target)
    with pytest.raises(ConfigError, match="no requests"):
        await replay(workload_of(0), target)
    assert target.calls == []


class SpyLLM:
    """An AsyncLLM whose calls are kept."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.given: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *arguments: Any, **extras: Any) -> Any:
        self.given.append({"prompt": arguments[0], "params": arguments[1]} | extras)
        return self._llm.generate(*arguments, **extras)


async def test_an_engine_in_this_process() -> None:
    mix = [
        (RequestClass("ls", SLO(ttft=5.0, tpot=0.5), is_latency_sensitive=True, priority=1), 0.5),
        (RequestClass("be", patience=60.0), 0.5),
    ]
    workload = share_prefixes(
        make_workload(np.arange(8) * 0.01, fixed_lengths(8, 100, 5)), num_groups=1, num_tokens=64, block_tokens=32
    )
    workload = assign_tenants(assign_classes(workload, mix, seed=3), [1.0, 1.0])
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=2) as llm:
        spy: Any = SpyLLM(llm)
        run: LiveRun = await replay(workload, EmbeddedTarget(spy), seed=4)
        shape = EngineShape.of(llm.config)
    assert (run.timeline.outcome == FINISHED).all()
    assert (run.timeline.num_output == 5).all(), "whatever the model wanted"
    assert (run.timeline.num_cached[4:] >= 64).all(), "the prefix that they share"
    assert (run.timeline.scheduled >= run.timeline.arrival).all()
    assert (run.timeline.scheduled <= run.timeline.first_token).all()
    assert (run.backend, run.model) == ("actorllm", "storyteller")
    assert 0 < run.delays.submit_s < run.timeline.ttft.max()
    assert 0 < run.delays.deliver_s < run.timeline.ttft.max()
    for row, given in enumerate(spy.given[1:]):
        kind = workload.classes[workload.class_ids[row]]
        assert len(given["prompt"]["prompt_token_ids"]) == 100
        assert (given["slo"], given["type_info"], given["priority"]) == (kind.slo, kind.name, kind.priority)
        assert given["is_latency_sensitive"] == kind.is_latency_sensitive
        assert given["tenant"] == workload.tenants[workload.tenant_ids[row]]  # type: ignore[index]
        assert (given["deadline"] is None) == (kind.name == "ls")
        assert given["params"].ignore_eos
    simulated = simulate(run.as_sent(), shape, preset("a100-llama-3-8b"))
    assert simulated.evaluate().to_dict().keys() == run.evaluate().to_dict().keys(), "one report for both"


async def test_an_engine_that_dies_fails_its_requests_only() -> None:
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1)

    class Mortal(EmbeddedTarget):
        async def send(self, call: ReplayCall, record: ReplayRecord) -> None:
            if call.row == 2:
                llm.shutdown()
            await super().send(call, record)

    run = await replay(workload_of(4, gap=0.01, num_output=400), Mortal(llm), num_warmups=0)
    assert (run.timeline.outcome == FAILED).all()
    assert all("EngineShutdownError" in error for error in run.errors)


async def test_turns_are_sent_when_the_ones_before_them_have_ended() -> None:
    """Their prompts begin with what was said: the ids that the target told."""

    class Telling(FakeTarget):
        async def answer(self, call: ReplayCall, record: ReplayRecord) -> None:
            record.got(3, [90 + call.row] * 3 if call.is_continued else ())

    workload = workload_of(4)
    turns = Turns.of([[], [0], [], [1]], [0.0, 0.02, 0.0, 0.01])
    prompts = np.array([8, 14, 8, 20], np.int32)
    workload = replace(workload, num_prompt=prompts, turns=turns).arriving(np.array([0.0, 0.0, 0.001, 0.0]))
    target = Telling()
    run = await replay(workload, target, num_warmups=0)
    first, other, second, third = target.calls
    assert [call.row for call in target.calls] == [0, 1, 2, 3]
    assert second.prompt[:11] == first.prompt + [90] * 3
    assert third.prompt[:17] == second.prompt + [92] * 3
    assert other.prompt[:8] != first.prompt
    ends = run.timeline.last_token
    assert run.timeline.arrival[2] >= ends[0] + 0.02
    assert run.timeline.arrival[3] >= ends[2] + 0.01
    assert run.num_left_out == 0


async def test_a_bound_on_the_requests_under_way() -> None:
    class Counting(FakeTarget):
        most = num = 0

        async def answer(self, call: ReplayCall, record: ReplayRecord) -> None:
            self.num += 1
            self.most = max(self.most, self.num)
            await super().answer(call, record)
            self.num -= 1

    target = Counting()
    run = await replay(workload_of(9, gap=0.0), target, num_warmups=0, max_concurrency=2)
    assert target.most == 2
    assert (run.timeline.outcome == FINISHED).all()
    assert run.due is not None
    assert run.due.tolist() == [0.0] * 9, "all wanted to be sent at once"
    assert (np.diff(run.timeline.arrival) >= 0).all()


async def test_a_session_on_an_engine_finds_what_it_said_before() -> None:
    turns = Turns.of([[], [0], [1]], [0.0, 0.0, 0.0])
    prompts = np.array([60, 100, 140], np.int32)
    made = make_workload(np.zeros(3), (prompts, np.full(3, 12, np.int32)), "session")
    async with AsyncLLM("storyteller", topology="inline") as llm:
        run = await replay(replace(made, turns=turns), EmbeddedTarget(llm), num_warmups=0)
        size = llm.config.cache.block_size
    assert run.errors == ("", "", "")
    # The key and value of the last token of a turn were not computed.
    assert run.timeline.num_cached.tolist() == [0, (60 + 12 - 1) // size * size, (100 + 12 - 1) // size * size]
