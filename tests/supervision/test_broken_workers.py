"""Workers that can do nothing any more, or say what cannot be: others take their place, and the requests go on."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, LLMEngine, PoolingParams, SamplingParams
from actorllm.errors import EngineDeadError, EngineStartError, RequestFailedError
from actorllm.supervision.blame.worker_deaths import MAX_ALONE
from actorllm.supervision.restart import RestartLimits
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import BLINDING, BREAKING, VOCAB
from tests.scheduling.chained_tokens import reference_stream

NUM_REQUESTS = 6


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AsyncLLM]]:
    """An engine with these workers."""
    llms: list[AsyncLLM] = []

    def make(workers: str, **arguments: Any) -> AsyncLLM:
        quick = RestartLimits(first_delay_s=0.01)
        monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers(workers))
        monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: quick)
        llms.append(AsyncLLM("storyteller", max_num_seqs=16, **arguments))
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()


async def complete(llm: AsyncLLM, prompt: list[int], seed: int, max_tokens: int = 30) -> Any:
    """The tokens, or the error."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, detokenize=False)
    try:
        return (await llm.complete(prompt, params)).outputs[0].token_ids
    except (RequestFailedError, EngineDeadError, EngineStartError) as error:
        return error


async def complete_all(llm: AsyncLLM, prompts: list[list[int]], max_tokens: int = 30) -> list[Any]:
    ends: dict[int, Any] = {}

    async def one(number: int, prompt: list[int]) -> None:
        ends[number] = await complete(llm, prompt, number, max_tokens)

    async with anyio.create_task_group() as tasks:
        for number, prompt in enumerate(prompts):
            tasks.start_soon(one, number, prompt)
    return [ends[number] for number in range(len(prompts))]


def prompts_of(count: int = NUM_REQUESTS, special: int | None = None, token: int = 0) -> list[list[int]]:
    return [[5, token if number == special else 6, 7 + number] for number in range(count)]


def expected_of(prompts: list[list[int]], max_tokens: int = 30) -> list[list[int]]:
    return [reference_stream(prompt, seed, max_tokens, VOCAB) for seed, prompt in enumerate(prompts)]


# Workers that can do nothing any more ---------------------------------------------------------------------------------


async def test_a_worker_that_broke_is_replaced_and_no_request_notices(
    make_llm: Callable[..., AsyncLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is alone in the first step that fails: that is no proof against it."""
    file = tmp_path / "broken"
    file.write_text("once")
    monkeypatch.setenv("ACTORLLM_TEST_BROKEN", str(file))
    llm = make_llm("BreakingWorkerActor")
    assert await complete(llm, [5, 6], 1) == reference_stream([5, 6], 1, 30, VOCAB)
    worker = llm.health().actors["worker0"]
    assert worker.num_restarts == 1
    assert worker.last_failure is not None
    assert worker.last_failure.startswith(
        "worker0 failed with EngineError: no step works any more, whatever the request"
    )
    assert "RuntimeError: the accelerator is gone" in worker.last_failure


MOST_DEATHS = 8
"""Of workers, until one request among two is found."""


@pytest.mark.parametrize("token", [BREAKING, BLINDING])
async def test_a_request_that_breaks_workers_is_found(make_llm: Callable[..., AsyncLLM], token: int) -> None:
    """Whether every step raises from then on, or nothing is finite any more."""
    llm = make_llm("BreakingWorkerActor")
    prompts = prompts_of(2, special=1, token=token)
    ends = await complete_all(llm, prompts)
    error = ends.pop(1)
    assert isinstance(error, RequestFailedError)
    assert str(error).startswith(f"the workers died {MAX_ALONE} times while they ran this request alone; the last time")
    assert "no step works any more" in str(error)
    expected = expected_of(prompts)
    expected.pop(1)
    assert ends == expected
    assert llm.health().state == "running"
    assert llm.health().actors["worker0"].num_restarts <= MOST_DEATHS


async def test_bad_prompts_cost_no_worker_its_life(make_llm: Callable[..., AsyncLLM]) -> None:
    """However many in a row, at once or one after the other, on an engine that does nothing else."""
    llm = make_llm("BreakingWorkerActor")
    for number in range(12):
        error = await complete(llm, [4095, number], number)
        assert str(error) == "RuntimeError: the model does not like token 4095"
    assert {str(end) for end in await complete_all(llm, [[4095, 1]] * 3)} == {str(error)}
    (worker,) = (await llm.stats())["workers"]
    assert worker["num_checks"] == worker["num_failed_steps"] >= 15
    assert llm.health().num_recoveries == 0
    assert await complete(llm, [5, 6], 1) == reference_stream([5, 6], 1, 30, VOCAB)
    (worker,) = (await llm.stats())["workers"]
    assert worker["num_checks"] == worker["num_failed_steps"], "none for steps that work"


async def test_where_no_worker_works_the_engine_ends_with_the_error_and_blames_nobody(
    make_llm: Callable[..., AsyncLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is to replace one that broke shows that it can do a step before it is given any."""
    file = tmp_path / "broken"
    file.write_text("")
    monkeypatch.setenv("ACTORLLM_TEST_BROKEN", str(file))
    llm = make_llm("BreakingWorkerActor")
    await llm.start()
    file.write_text("for ever")
    ends = await complete_all(llm, prompts_of(special=0, token=BREAKING))
    assert all(isinstance(end, EngineDeadError) for end in ends)
    assert str(ends[0]).startswith("worker0 failed with RuntimeError: the accelerator is gone")
    assert llm.health().state == "dead"
    assert llm.health().num_recoveries == 0


@pytest.mark.parametrize("topology", ["process", "inline"])
async def test_a_model_whose_first_forward_raises_is_an_error_of_the_start(
    make_llm: Callable[..., AsyncLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    """Of everybody who waits for it; nothing of the engine is left."""
    file = tmp_path / "broken"
    file.write_text("for ever")
    monkeypatch.setenv("ACTORLLM_TEST_BROKEN", str(file))
    llm = make_llm("BreakingWorkerActor", topology=topology)
    ends = await complete_all(llm, prompts_of(2))
    with pytest.raises(EngineStartError) as raised:
        await llm.start()
    assert {str(end) for end in (*ends, raised.value)} == {
        "worker0 failed to start: RuntimeError: the accelerator is gone"
    }
    assert llm._engine.pids == {}


@pytest.mark.parametrize("arguments", [{"topology": "inline"}, {"on_failure": "raise"}])
async def test_the_first_time_is_the_end_where_nothing_is_started_again(
    make_llm: Callable[..., AsyncLLM], arguments: dict[str, Any]
) -> None:
    llm = make_llm("BreakingWorkerActor", **arguments)
    assert await complete(llm, [4095, 1], 1) != []
    ends = await complete_all(llm, prompts_of(special=0, token=BREAKING))
    assert all(isinstance(end, EngineDeadError) for end in ends)
    assert str(ends[0]).startswith("worker0 failed with EngineError: no step works any more")


# Workers that say what cannot be --------------------------------------------------------------------------------------


LIES = {
    "twice": r"it answered step \d+ when (step \d+|no step) was to be answered",
    "out of order": r"it answered step \d+ when (step \d+|no step) was to be answered",
    "never asked": r"it answered step 10\d\d when step \d+ was to be answered",
    "too many tokens": r"step \d+: 7 tokens for a plan of 6",
    "two of each": r"step \d+: 2 tokens of one row, of which a step has 1 at most",
    "no such id": r"step \d+: a token id outside the vocabulary of 4096",
    "no such row": r"step \d+: row \[6\] of a plan of 6",
}

MALFORMED = {
    "tokens=null": r"step \d+: StepResult.tokens=None",
    "counts=null": r"step \d+: StepResult.counts=None",
    'started="x"': r"step \d+: StepResult.started='x'",
    "ended=[1]": r"step \d+: StepResult.ended=\[1\]",
    "fewer than none": r"step \d+: StepResult.nonfinite_counts=\[-5\]",
}
"""What no field of a report may hold, whatever the plan: the field, and its value in JSON."""

IMPOSSIBLE = {
    "step=true": r"it answered step True when step \d+ was to be answered",
    "a row twice": r"step \d+: row \[1, 1\], not each of them once",
    "no such fault": r"step \d+: row \[99\] of a plan of 6",
    "vectors for tokens": r"step \d+: vectors of rows \[0\], some of which want tokens",
    "another's message": r"it sent a Submit, which is not for a worker to send",
    "not a number": r"it sent Reply.id='1'",
    "no frame": r"a frame of worker0 is no message: message kind 99 is unknown",
}


@pytest.mark.parametrize("lies", [LIES, MALFORMED, IMPOSSIBLE], ids=["of the plan", "of a field", "of a report"])
async def test_who_contradicts_its_plans_is_replaced_and_nothing_of_it_is_delivered(
    make_llm: Callable[..., AsyncLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lies: dict[str, str],
) -> None:
    file = tmp_path / "lies"
    file.write_text("\n".join(lies))
    monkeypatch.setenv("ACTORLLM_TEST_LIES", str(file))
    llm = make_llm("LyingWorkerActor")
    prompts = prompts_of()
    with caplog.at_level(logging.ERROR, "actorllm"):
        assert await complete_all(llm, prompts, 150) == expected_of(prompts, 150)
    deaths = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "death"]
    assert len(deaths) == len(lies)
    for death, told in zip(deaths, lies.values(), strict=True):
        assert re.match(f"worker0 was killed because it was contradicting its plans: {told}", death), death
    assert llm.health().actors["worker0"].num_restarts == len(lies)


VECTORS = {
    "a token for a vector": r"step \d+: no vectors of rows \[0\]",
    "neither": r"step \d+: no vectors of rows \[0\]",
    "both": r"step \d+: tokens of rows \[0\], which want vectors",
    "an empty vector": r"step \d+: 0 numbers for 1 vectors of 256 numbers in all",
    "a narrow vector": r"step \d+: 255 numbers for 1 vectors of 256 numbers in all",
    "a wide vector": r"step \d+: 257 numbers for 1 vectors of 256 numbers in all",
    "not finite": r"step \d+: NaN or infinity in the vectors of rows \[0\]",
    "vectors=null": r"step \d+: StepResult.vectors=None",
}


async def test_a_prompt_has_its_vector_whatever_a_worker_says_of_it(
    make_llm: Callable[..., AsyncLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "lies"
    file.write_text("\n".join(VECTORS))
    monkeypatch.setenv("ACTORLLM_TEST_LIES", str(file))
    llm = make_llm("LyingWorkerActor", runner="pooling", hf_overrides={"is_matryoshka": True})
    as_it_is = PoolingParams(normalize=False, dimensions=2)
    with caplog.at_level(logging.ERROR, "actorllm"):
        for number in range(9 * len(VECTORS) + 5):  # the tenth of each worker is wrong, and is computed again
            assert (await llm.embed([7 + number, 5, 6], as_it_is)).outputs.embedding == [7.0 + number, 3.0]
    deaths = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "death"]
    assert len(deaths) == len(VECTORS)
    for death, told in zip(deaths, VECTORS.values(), strict=True):
        assert re.match(f"worker0 was killed because it was contradicting its plans: {told}", death), death


@pytest.mark.parametrize("kind", ["twice", "no such id"])
async def test_where_it_cannot_be_replaced_it_is_the_end_of_the_engine(
    make_llm: Callable[..., AsyncLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = tmp_path / "lies"
    file.write_text(kind)
    monkeypatch.setenv("ACTORLLM_TEST_LIES", str(file))
    llm = make_llm("LyingWorkerActor", topology="inline")
    ends = await complete_all(llm, prompts_of(), 150)
    assert all(isinstance(end, EngineDeadError) for end in ends)
    assert str(ends[0]).startswith("worker0 failed with EngineError: it was found contradicting its plans: ")


@pytest.mark.parametrize("defect", ["broken", "lying"])
def test_an_engine_that_is_stepped_raises_and_is_dead(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    engine = LLMEngine("storyteller", topology="inline", num_threads=1)
    engine.add_request("a", "Once", SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    stepper = engine._engine.stepper
    assert stepper is not None
    runner, sample = stepper._worker.runner, stepper._worker.runner.sample

    def fail(plan: Any) -> Any:
        raise RuntimeError("the accelerator is gone")

    if defect == "broken":
        monkeypatch.setattr(runner, "execute", fail)
    else:
        monkeypatch.setattr(runner, "sample", lambda *args: dataclasses.replace(sample(*args), step=7))

    def run() -> None:
        while engine.has_unfinished_requests():
            engine.step()

    with pytest.raises(EngineDeadError, match=r"worker0 failed with \w+: (no step works|it was found contradicting)"):
        run()
    assert not engine.has_unfinished_requests()
    assert engine.health().state == "dead"
    with pytest.raises(EngineDeadError):
        engine.add_request("b", "Once", SamplingParams(max_tokens=5))
    engine.shutdown()
