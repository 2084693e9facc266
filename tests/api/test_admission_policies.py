"""Admission policies on the live engine: who is turned away hears why, and one that fails harms nobody."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from actorllm import SLO, AsyncLLM, EngineOverloaded, SamplingParams
from actorllm.scheduling.admission_policy import AdmissionPolicy

PROMPT = "Once upon a time"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def short(num_tokens: int = 3, **arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, **arguments)


async def scheduler_of(llm: AsyncLLM) -> dict[str, Any]:
    counts: dict[str, Any] = (await llm.stats())["scheduler"]
    return counts


def start(admission: str, **arguments: Any) -> AsyncLLM:
    return AsyncLLM(
        "storyteller", dtype="float32", num_threads=1, max_num_seqs=2, admission_policy=admission, **arguments
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = start("ttft-reject", topology="inline")
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("n", [1, 3])
async def test_who_is_turned_away_hears_why(llm: AsyncLLM, n: int) -> None:
    """A first token within a microsecond is late before anybody has seen the request."""
    before = (await scheduler_of(llm))["scheduler"]["num_rejected"]
    going_on = llm.generate(PROMPT, short(30))
    await going_on.__anext__()
    with pytest.raises(EngineOverloaded, match=r"admission policy 'ttft-reject': its first token was due .* s ago"):
        await llm.complete(PROMPT, short(n=n), slo=SLO(ttft=1e-6))
    assert (await llm.complete(PROMPT, short(), slo=SLO(ttft=60))).finished
    *_, last = [output async for output in going_on]
    assert len(last.outputs[0].token_ids) == 30
    counts = (await scheduler_of(llm))["scheduler"]
    assert counts["num_rejected"] >= before + 1
    assert (counts["num_running"], counts["num_waiting"], counts["kv"]["usage"]) == (0, 0, 0.0)


class Broken(AdmissionPolicy):
    name = "broken"

    def admit(self, *arguments: Any) -> Any:
        raise RuntimeError("no such tenant")


async def test_one_that_raises_is_named_and_admits_everybody(caplog: pytest.LogCaptureFixture) -> None:
    name = "tests.api.test_admission_policies:Broken"
    async with start(name, topology="inline") as llm:
        with caplog.at_level(logging.ERROR):
            assert (await llm.complete(PROMPT, short())).finished
        assert f"admission policy {name!r} failed in admit; all requests are admitted" in caplog.text
        assert (await scheduler_of(llm))["admission_failure"] == "admit raised RuntimeError: no such tenant"
        assert (await llm.complete(PROMPT, short())).finished


async def test_in_a_process_of_its_own() -> None:
    async with start("past-future") as llm:
        outputs: list[int] = []

        async def one() -> None:
            outputs.append(len((await llm.complete(PROMPT, short(9))).outputs[0].token_ids))

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(one)
        assert outputs == [9] * 6
        assert (await scheduler_of(llm))["admission_failure"] is None


async def test_objectives_that_nobody_can_keep_are_warned_of(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        await llm.complete(PROMPT, short(30), slo=SLO(tpot=1e-6, ttft=50.0, e2e=40.0))
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    (contradiction,) = [text for text in told if "can never be kept" in text]
    assert "e2e=40.0 ends before ttft=50.0 does" in contradiction
    (too_fast,) = [text for text in told if "cannot be met" in text]
    assert too_fast.startswith("SLO tpot=1e-06 s cannot be met: the fastest of the last 20 steps took 0.0")
