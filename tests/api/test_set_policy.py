"""`set_policy`: other policies on a running engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording, told_scheduler
from actorllm.errors import EngineError, InvalidParameterError
from actorllm.messages import Ask, StepPlan, pack
from actorllm.messages.untrusted import check_foreign
from actorllm.scheduling.telemetry.recording import RecordedScheduler, replay
from actorllm.slo.simulator import rerun
from tests.api import own_policies

pytestmark = pytest.mark.anyio

OWN = f"{own_policies.__name__}:ShortestFirst"
PROMPTS = [" ".join(["Once upon a time"] * n) for n in (9, 1, 5, 3, 7, 2)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def texts(llm: AsyncLLM) -> list[str]:
    found: dict[int, str] = {}

    async def one(number: int) -> None:
        found[number] = (await llm.complete(PROMPTS[number], PARAMS)).outputs[0].text

    async with anyio.create_task_group() as group:
        for number in range(len(PROMPTS)):
            group.start_soon(one, number)
    return [found[number] for number in range(len(PROMPTS))]


async def test_recordings_have_the_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on with the same tokens, and recorded calls give the same plans: with the policies at hand and without."""
    file = tmp_path / "run.bin"
    live: list[StepPlan] = []
    schedule = RecordedScheduler.schedule

    def watched(scheduler: RecordedScheduler, at: float) -> StepPlan | None:
        plan = schedule(scheduler, at)
        live.extend([plan] if plan is not None else [])
        return plan

    monkeypatch.setattr(RecordedScheduler, "schedule", watched)
    async with AsyncLLM(
        "storyteller", dtype="float32", topology="inline", num_threads=1, max_num_seqs=2, record=file
    ) as llm:
        expected = await texts(llm)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(texts, llm)
            for policy, admission in (
                ("edf", None),
                (OWN, None),
                ("cohost", "worst-case"),
                (OWN, "none"),
                ("vtc", None),
            ):
                await anyio.sleep(0.02)
                await llm.set_policy(policy, admission_policy=admission)
        assert await texts(llm) == expected
        told = (await llm.stats())["scheduler"]
        assert told["policy"] == {"scheduling": "vtc", "admission": None, "num_changes": 5}
        assert llm.config.scheduler.policy == "vtc"
        assert told["scheduler"]["num_refused_decisions"] == 0
    plans = [[pack(plan) for plan in live]]
    for drive, make in ((replay, fresh_scheduler), (rerun, fresh_scheduler), (replay, told_scheduler)):
        plans.append([pack(plan) for plan in drive(read_recording(file), make(file))])
    engine, *others = [[(k, s, [a.tobytes() for a in r]) for k, s, r in packed] for packed in plans]
    assert [other == engine for other in others] == [True] * 3
    # Elsewhere the user's own policy is not at hand: what it decided is in the recording.
    monkeypatch.delattr(own_policies, "ShortestFirst")
    told_plans = [pack(plan) for plan in replay(read_recording(file), told_scheduler(file))]
    assert [(k, s, [a.tobytes() for a in r]) for k, s, r in told_plans] == engine


async def test_a_wrong_one_changes_nothing() -> None:
    async with AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1) as llm:
        for wrong in ("edg", "no_such_module:Class", f"{own_policies.__name__}:Longest"):
            with pytest.raises(InvalidParameterError):
                await llm.set_policy(wrong)
        for arguments, said in (
            ((), "needs scheduling_policy"),
            ((5,), "scheduling_policy=5"),
            (("",), "must be a name"),
            (("\ud800",), "must be a name"),
        ):
            with pytest.raises(InvalidParameterError, match=said):
                await llm.set_policy(*arguments)  # type: ignore[arg-type]
        with pytest.raises(InvalidParameterError):
            await llm.set_policy(admission_policy="no-such")
        told = (await llm.stats())["scheduler"]["policy"]
        assert told == {"scheduling": "fcfs", "admission": None, "num_changes": 0}
        await llm.complete("Once", PARAMS)


async def test_one_that_can_be_built_once_leaves_those_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_policies.Once, "num_built", 0)
    async with AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1) as llm:
        await llm.set_policy("edf")
        with pytest.raises(InvalidParameterError, match=r"it is taken.*the policies are those of before"):
            await llm.set_policy(f"{own_policies.__name__}:Once", admission_policy="worst-case")
        assert (llm.config.scheduler.policy, llm.config.scheduler.admission) == ("edf", None), (
            "the next one begins with it"
        )
        told = (await llm.stats())["scheduler"]["policy"]
        assert told == {"scheduling": "edf", "admission": None, "num_changes": 1}


async def test_policies_that_end_the_process_fail_their_call_alone() -> None:
    async with AsyncLLM("storyteller", dtype="float32", num_threads=1) as llm:
        expected = await texts(llm)
        with pytest.raises(InvalidParameterError, match="SystemExit: no licence"):
            await llm.set_policy(f"{own_policies.__name__}:Exiting")
        assert llm.health().num_recoveries == 0
        with pytest.raises(EngineError, match="ended while it looked up policies, and none has changed"):
            await llm.set_policy(f"{own_policies.__name__}:Ending")
        assert await texts(llm) == expected
        assert llm.health().num_recoveries == 1
        await llm.set_policy("edf")


async def test_a_scheduler_that_is_started_again_keeps_it_and_others_cannot_change_it() -> None:
    async with AsyncLLM("storyteller", dtype="float32", num_threads=1, name="policies-of-mine") as llm:
        expected = await texts(llm)
        await llm.set_policy(OWN)
        async with AsyncLLM.attach("policies-of-mine") as other:
            with pytest.raises(EngineError, match="belongs to another process"):
                await other.set_policy("edf")
        stream = llm.generate(PROMPTS[0], PARAMS)
        await anext(stream)
        os.kill(llm._engine.pids["scheduler"], signal.SIGKILL)
        assert [output async for output in stream][-1].outputs[0].text == expected[0]
        told = (await llm.stats())["scheduler"]["policy"]
        assert told == {"scheduling": OWN, "admission": None, "num_changes": 0}, "it began with it"
        assert await texts(llm) == expected


def test_a_blocking_engine() -> None:
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1) as llm:
        before = llm.generate(PROMPTS[:2], PARAMS)
        llm.set_policy("edf", admission_policy="past-future")
        after = llm.generate(PROMPTS[:2], PARAMS)
        assert [o.outputs[0].text for o in before] == [o.outputs[0].text for o in after]
        told = llm.stats()["scheduler"]["policy"]
        assert told == {"scheduling": "edf", "admission": "past-future", "num_changes": 1}


async def test_every_replica_changes() -> None:
    async with AsyncLLM("storyteller", dtype="float32", num_threads=1, data_parallel_size=2) as llm:
        await llm.set_policy("srpf")
        replicas = (await llm.stats())["scheduler"]["replicas"]
        assert [one["policy"]["scheduling"] for one in replicas.values()] == ["srpf", "srpf"]


@pytest.mark.parametrize("verb", ["check_policy", "set_policy", "request_log"])
def test_a_program_that_joins_loads_no_code_and_reads_no_requests_of_others(verb: str) -> None:
    with pytest.raises(ValueError, match="which only the owner of the engine asks"):
        check_foreign(Ask(id=1, verb=verb, arguments={"policy": OWN, "admission": None}), 100)
