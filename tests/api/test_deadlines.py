"""Requests that may take only so long, on every front door: what is there comes, and the blocks are free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from actorllm.actors.topology import Topology, engine_topology
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import InvalidParameterError

PROMPT = "Once upon a time"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def endless(**arguments: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, ignore_eos=True, seed=1, **arguments)


@pytest.fixture(scope="module", params=["process", "inline"])
def llm(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", dtype="float32", topology=request.param, num_threads=1, max_num_seqs=4)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def end_of(llm: AsyncLLM, params: SamplingParams, **arguments: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(PROMPT, params, **arguments)]


def is_expired(output: RequestOutput) -> bool:
    return output.finished and all((o.finish_reason, o.stop_reason) == ("abort", "deadline") for o in output.outputs)


async def is_idle(llm: AsyncLLM) -> bool:
    scheduler = (await llm.stats())["scheduler"]["scheduler"]
    return scheduler["num_running"] == scheduler["num_waiting"] == 0 and (
        scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"]
    )


async def test_what_there_is_comes_with_the_end(llm: AsyncLLM) -> None:
    whole = (await llm.complete(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True, seed=1))).outputs[0].token_ids
    for kind in RequestOutputKind:
        outputs = await end_of(llm, endless(output_kind=kind), timeout=0.15)
        assert is_expired(outputs[-1])
        assert not any(output.finished for output in outputs[:-1])
        last = outputs[-1].outputs[0]
        tokens = last.token_ids
        if kind is RequestOutputKind.DELTA:
            tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        assert tokens[:400] == whole[: len(tokens)]
    assert await is_idle(llm)


async def test_one_that_ends_in_time_does_not_notice(llm: AsyncLLM) -> None:
    output = await llm.complete(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), timeout=60)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)


async def test_who_still_waits_for_a_place_ends_without_a_token(llm: AsyncLLM) -> None:
    """Not as "length", and not only when its turn comes; the others go on."""
    running = [llm.generate(PROMPT, endless()) for _ in range(4)]
    for stream in running:
        await stream.__anext__()
    (output,) = await end_of(llm, endless(), timeout=0.05)
    assert is_expired(output)
    assert output.outputs[0].token_ids == []
    assert output.metrics is not None
    assert output.metrics.first_scheduled_time is None
    for stream in running:
        assert not (await stream.__anext__()).finished
        await stream.aclose()


async def test_all_sequences_of_a_request_end(llm: AsyncLLM) -> None:
    output = await llm.complete(PROMPT, endless(n=3), timeout=0.1)
    assert is_expired(output)
    assert len(output.outputs) == 3


async def test_the_earlier_of_deadline_and_timeout_counts(llm: AsyncLLM) -> None:
    for arguments in ({"deadline": now() + 0.05, "timeout": 60}, {"deadline": now() + 60, "timeout": 0.05}):
        with anyio.fail_after(20):
            assert is_expired(await llm.complete(PROMPT, endless(), **arguments))
    passed = await llm.complete(PROMPT, endless(), deadline=now() - 1)
    assert is_expired(passed)
    assert passed.outputs[0].token_ids == []


def type_name(value: object) -> str:
    """An integer of so many digits has no text."""
    return type(value).__name__


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, True, "1", 10**400, 10**5000], ids=type_name)
async def test_timeouts_that_are_none(llm: AsyncLLM, timeout: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"timeout=.* must be a number of seconds above 0"):
        llm.generate(PROMPT, endless(), timeout=timeout)


@pytest.mark.parametrize("deadline", [math.nan, math.inf, True, "1", 10**400, -(10**5000)], ids=type_name)
async def test_deadlines_that_are_none(llm: AsyncLLM, deadline: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"deadline=.* must be a time in monotonic seconds"):
        llm.generate(PROMPT, endless(), deadline=deadline)


def test_a_batch_has_one_timeout() -> None:
    with LLM("storyteller", topology="inline", num_threads=1, max_num_seqs=2) as llm:
        params = [SamplingParams(max_tokens=1), endless(), endless()]
        outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False, timeout=0.5)
        assert outputs[0].outputs[0].finish_reason == "length"
        assert all(is_expired(output) for output in outputs[1:])
        (output,) = llm.chat([{"role": "user", "content": "Tell"}], endless(), use_tqdm=False, timeout=0.1)
        assert is_expired(output)


def test_an_engine_that_is_stepped_keeps_deadlines() -> None:
    engine = LLMEngine("storyteller", topology="inline", num_threads=1)
    engine.add_request("a", PROMPT, endless(), timeout=0.05)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert is_expired(outputs[-1])
    engine.shutdown()


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_an_engine_that_is_not_there_yet_keeps_nobody(
    kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stream ends in time though the engine cannot say so; the request is gone when it comes there."""
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_a_start_that_waits)
    monkeypatch.setenv("ACTORLLM_TEST_WAIT", str(tmp_path / "go"))
    llm = AsyncLLM("storyteller", topology="inline")
    try:
        with anyio.fail_after(20):
            (output,) = await end_of(llm, endless(output_kind=kind, n=2, temperature=0.5), timeout=0.05)
        assert is_expired(output)
        assert [o.token_ids for o in output.outputs] == [[], []]
        assert not llm._engine._has_started
        (tmp_path / "go").touch()
        params = SamplingParams(max_tokens=2, ignore_eos=True, output_kind=kind, detokenize=False)
        assert (await end_of(llm, params))[-1].finished
        assert await is_idle(llm)
    finally:
        (tmp_path / "go").touch()
        llm.shutdown()


def with_a_start_that_waits(config: EngineConfig) -> Topology:
    topology = engine_topology(config)
    path = "tests.actors.scripted_worker:SlowWorkerActor"
    actors = [replace(a, path=path, preload=()) if a.name == "worker0" else a for a in topology.actors]
    return replace(topology, actors=tuple(actors))
