"""Frontend, scheduler and worker actors together, over a scripted model: ranks, late inputs, failures, controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import actorllm.client.engine_supervisor
from actorllm import LLM, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording, recorded_configuration, told_scheduler
from actorllm.config import EngineConfig
from actorllm.errors import RequestFailedError
from actorllm.messages import LateInputs, StepFailed, StepPlan, StepResult, Submit, pack
from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.policy import Admit, KeyPolicy
from actorllm.scheduling.telemetry.decisions import DECIDE
from actorllm.scheduling.telemetry.recording import RecordedScheduler, replay
from actorllm.slo.simulator import rerun
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import VOCAB
from tests.actors.worker_bench import make_worker, plan_for
from tests.scheduling.chained_tokens import reference_stream


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """An LLM over scripted workers."""
    llms: list[LLM] = []
    num_ranks = {"n": 1}
    right = EngineConfig.from_arguments

    def with_ranks(model: Any, **arguments: Any) -> EngineConfig:
        return dataclasses.replace(right(model, **arguments), world_size=num_ranks["n"])

    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers("ScriptedWorkerActor"))
    monkeypatch.setattr(EngineConfig, "from_arguments", with_ranks)

    def make(world_size: int = 1, **arguments: Any) -> LLM:
        num_ranks["n"] = world_size
        llms.append(LLM("storyteller", **arguments))
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()


def run(llm: LLM, count: int = 12) -> None:
    prompts = [[10 + i, 20 + i, 30 + i] * (1 + i) for i in range(count)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=i, detokenize=False) for i in range(count)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.outputs[0].token_ids == reference_stream(prompt, i, 20, VOCAB)


@pytest.mark.parametrize("topology", ["process", "inline"])
@pytest.mark.parametrize("depth", [1, 2])
def test_two_ranks_share_plans_and_the_smaller_cache(build: Callable[..., LLM], topology: str, depth: int) -> None:
    llm = build(2, topology=topology, async_scheduling=depth == 2)
    assert llm.config.cache.num_blocks == 80, "rank 1 has room for less"
    run(llm)
    statistics = llm.stats()
    first, second = statistics["workers"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["num_steps"] == second["num_steps"] > 0, "every rank runs every step"
    assert statistics["scheduler"]["scheduler"]["kv"]["num_free"] == 80


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_raises_fails_its_requests_only(build: Callable[..., LLM], world_size: int) -> None:
    llm = build(world_size, topology="inline")
    with pytest.raises(RequestFailedError, match="does not like token 4095"):
        llm.generate([[1, 4095]], SamplingParams(max_tokens=4), use_tqdm=False)
    run(llm)
    assert llm.stats()["scheduler"]["scheduler"]["num_failed_steps"] == 1


def complete_all(llm: LLM, prompts: list[list[int]], count: int = 20) -> list[list[int] | str]:
    """The tokens of every request, or what it failed with."""

    async def main() -> list[list[int] | str]:
        found: dict[int, list[int] | str] = {}

        async def one(i: int) -> None:
            params = SamplingParams(max_tokens=count, ignore_eos=True, seed=i, detokenize=False)
            try:
                stream = llm._engine.submit(prompts[i], params)
                async for output in stream:
                    found[i] = list(output.outputs[0].token_ids)
            except RequestFailedError as error:
                found[i] = str(error)

        async with anyio.create_task_group() as tasks:
            for i in range(len(prompts)):
                tasks.start_soon(one, i)
        return [found[i] for i in range(len(prompts))]

    return anyio.run(main)


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_the_others_of_a_step_that_raises_go_on(build: Callable[..., LLM], topology: str) -> None:
    llm = build(topology=topology)
    prompts = [[10 + i, 4095 if i == 5 else 20 + i, 30 + i] for i in range(12)]
    results = complete_all(llm, prompts)
    assert results.pop(5) == "RuntimeError: the model does not like token 4095"
    prompts.pop(5)
    seeds = [i for i in range(12) if i != 5]
    assert results == [reference_stream(p, seed, 20, VOCAB) for p, seed in zip(prompts, seeds, strict=True)]
    statistics = llm.stats()["scheduler"]["scheduler"]
    assert 1 < statistics["num_failed_steps"] <= 5
    assert statistics["num_retrying"] == 0


def test_steps_without_memory_are_followed_by_smaller_ones(build: Callable[..., LLM]) -> None:
    llm = build(topology="inline")
    prompts = [[10 + i, 4094, 30 + i] for i in range(12)]  # three of them are too much for a step
    results = complete_all(llm, prompts)
    assert results == [reference_stream(p, i, 20, VOCAB) for i, p in enumerate(prompts)]
    assert llm.stats()["scheduler"]["scheduler"]["num_memory_failures"] >= 1


def test_controls_are_answered_between_steps(build: Callable[..., LLM]) -> None:
    llm = build(topology="inline")
    assert llm._engine.ask_scheduler("reset_prefix_cache").result(30) is True
    llm._engine.ask_scheduler("start_timeline").result(30)
    run(llm, 2)
    names = [event["name"] for event in llm._engine.ask_scheduler("take_timeline").result(30)]
    for name in ("plan 1", "step 1", "update 1", "detokenize 1", "send 1"):
        assert name in names


def test_a_profile_is_taken_of_every_rank(build: Callable[..., LLM]) -> None:
    llm = build(2, topology="inline")
    assert llm._engine.ask_scheduler("start_profile").result(30) == [True, True]
    assert llm._engine.ask_scheduler("stop_profile", folder="f").result(30) == ["f/rank0", "f/rank1"]


class SulksLater(KeyPolicy):
    """Shortest prompt first, with pauses of the decode, until it lets nobody in any more and nobody decode: it is replaced."""

    num_plans = 0

    def key(self, sequence: Any, view: Any) -> Any:
        return (sequence.num_prompt,)

    def decode_mask(self, view: Any) -> Any:
        self.num_plans += 1
        is_sulking = self.num_plans > 40
        return np.full(view.decode_slots.size, not is_sulking) if is_sulking or self.num_plans % 3 else None

    def admit(self, sequence: Any, view: Any) -> Admit:
        return Admit.WAIT if self.num_plans > 30 else Admit.ADMIT


class ShutsLater(AdmissionPolicy):
    name = "shuts-later"
    num_asked = 0

    def admit(self, *arguments: Any) -> Admit:
        self.num_asked += 1
        return Admit.WAIT if self.num_asked > 12 else Admit.ADMIT


OWN = "tests.actors.test_engine_actors"


@pytest.mark.parametrize(
    "policies",
    [
        {},
        {"scheduling_policy": f"{OWN}:SulksLater"},
        {"scheduling_policy": "srpf", "admission_policy": f"{OWN}:ShutsLater"},
    ],
    ids=["built in", "stalls", "admission stalls"],
)
def test_a_live_recording_replays_byte_for_byte(
    build: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policies: dict[str, str]
) -> None:
    """The plans of the engine, of its recorded calls, and of the simulator's own loop with the recorded times.

    Of policies of one's own also of their recorded decisions, without them. Those that stall are replaced on the way.
    """
    file = tmp_path / "recording"
    live: list[StepPlan] = []
    schedule = RecordedScheduler.schedule

    def watched(scheduler: RecordedScheduler, at: float) -> StepPlan | None:
        plan = schedule(scheduler, at)
        live.extend([plan] if plan is not None else [])
        return plan

    monkeypatch.setattr(RecordedScheduler, "schedule", watched)
    given = {"kv_cache_memory_bytes": None, "max_model_len": 320, "max_num_seqs": 8, **policies}
    llm = build(topology="inline", record=str(file), **given)
    with ThreadPoolExecutor(3) as callers:  # so that requests come while others run
        for call in [callers.submit(run, llm, count) for count in (16, 9, 5)]:
            call.result()
    config, told = llm.config, llm.stats()["scheduler"]
    llm.shutdown()
    assert recorded_configuration(file) == config, "with its KV blocks"
    failures = [kind for kind in ("policy", "admission") if "StalledPolicyError" in str(told[f"{kind}_failure"])]
    assert failures == [kind.split("_")[0].replace("scheduling", "policy") for kind in list(policies)[-1:]]
    plans = [[pack(plan) for plan in live]]
    for drive, make in ((replay, fresh_scheduler), (rerun, fresh_scheduler), (replay, told_scheduler)):
        if policies and drive is rerun:
            continue  # these count how often they are asked, which is up to the loop
        if make is told_scheduler:  # as if it had never been there
            monkeypatch.setattr("actorllm.actors.record_file.build_policy", None)
            assert any(call.startswith(DECIDE) for call, _, _ in read_recording(file)) == bool(policies)
            if not policies:
                break
        scheduler = make(file)
        plans.append([pack(plan) for plan in drive(read_recording(file), scheduler)])
        assert scheduler.statistics().num_dropped_results == 0, "every recorded result fits the replayed plans"
        assert scheduler.statistics().num_running == 0
    engine, *others = [[(k, s, [a.tobytes() for a in r]) for k, s, r in packed] for packed in plans]
    assert [other == engine for other in others] == [True, True]
    assert len(engine) == sum(1 for call, _, result in read_recording(file) if call == "update")


@pytest.mark.parametrize("policy", ["cohost", "fairbatch", "qoserve", "vtc"])
def test_policies_that_learn_from_steps_run_on_the_engine(build: Callable[..., LLM], policy: str) -> None:
    llm = build(topology="inline", scheduling_policy=policy, max_num_seqs=4)
    run(llm, 9)
    assert llm.stats()["scheduler"]["scheduler"]["num_refused_decisions"] == 0


async def test_rank_zero_reports_tokens_and_the_others_acknowledge() -> None:
    for rank, num_tokens in ((0, 1), (1, 0)):
        worker, link, scheduler = make_worker(rank)
        await worker._step(link, plan_for(scheduler))  # type: ignore[arg-type]
        (result,) = link.sent
        assert isinstance(result, StepResult)
        assert (result.step, result.tokens.size) == (1, num_tokens)
        assert 0 < result.started <= result.ended


async def test_a_failing_step_is_reported_and_the_worker_lives() -> None:
    worker, link, scheduler = make_worker(0)
    plan = plan_for(scheduler)
    object.__setattr__(plan, "prefill_counts", np.array([9], np.int32))
    await worker._step(link, plan)  # type: ignore[arg-type]
    (failure,) = link.sent
    assert isinstance(failure, StepFailed)
    assert (failure.step, "beyond the known ones" in failure.error) == (1, True)


async def test_sampling_waits_for_late_inputs() -> None:
    worker, link, scheduler = make_worker(0)
    plan = plan_for(scheduler, needs_late_inputs=True)
    assert plan.late_slots.tolist() == [0]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker._step, link, plan)  # type: ignore[arg-type]
        await anyio.wait_all_tasks_blocked()
        assert link.sent == [], "sampled before its late inputs came"
        worker.on_message(link, LateInputs(step=1))  # type: ignore[arg-type]
        worker.on_batch()
    (result,) = link.sent
    assert isinstance(result, StepResult)


def test_late_inputs_follow_the_results_they_depend_on(
    build: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Submit.__init__

    def late(self: Submit, **columns: Any) -> None:
        right(self, **columns | {"needs_late_inputs": True})

    monkeypatch.setattr(Submit, "__init__", late)
    run(build(topology="inline"), 4)
