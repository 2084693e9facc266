"""What is killed of a fleet, against every kind of request: the caller has the tokens and log-probabilities of an undisturbed run.

Rows are the events below, a replica that is lost, and one that dies while it starts. Each happens while requests of all kinds
run at the same time: those of `streams.REQUESTS`, the same pinned to the replica that it happens to, one that is aborted, and one
with a deadline. All that may go anywhere is sent to that replica, so each cell of the matrix is one that moves, or that waits.
Pooling has an engine of its own, and all rows. `test_moves` has a sample that takes seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import actorllm.client.engine_supervisor
import actorllm.fleet.dispatcher
from actorllm import LLM, AsyncLLM, RequestOutput
from actorllm.fleet.replica import Replica
from actorllm.supervision.restart import RestartLimits
from tests.effort import each_value
from tests.fleet.streams import (
    PROMPTS,
    Told,
    all_run,
    assert_same,
    kill,
    moved,
    params,
    run_all,
    until,
)

pytestmark = [
    pytest.mark.slow(reason="kills whole replicas for minutes; test_moves has a cell of each row and column"),
    pytest.mark.leaks_by_module,
]

LONG = params(11, max_tokens=1500)
NUM_BEFORE_ABORT = 60
NUM_LONG = 8
"""Sequences of `REQUESTS` that have NUM_TOKENS tokens whatever they are: they run when one of them has 20 or 30."""
DEADLINE_S = 3.0
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "data_parallel_size": 2, "standby_worker": False}


@pytest.fixture(scope="module", autouse=True)
def short_trials() -> Iterator[None]:
    """Restarts are expected to take long: else streams may rightly stay where they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actorllm.fleet.dispatcher, "TRIAL_S", 0.2)
        patch.setattr(Replica, "expected_restart_s", lambda self, start_s: 600.0)
        yield


async def start(**more: Any) -> AsyncLLM:
    llm = AsyncLLM("storyteller", router="tests.fleet.streams:ToTheFirst", **OPTIONS, **more)
    await llm.start()
    await all_run(llm)
    return llm


async def start_pooling() -> AsyncLLM:
    return await start(runner="pooling", max_num_seqs=4)


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[AsyncLLM]:
    llm = await start(enable_prompt_embeds=True)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
async def pooling() -> AsyncIterator[AsyncLLM]:
    llm = await start_pooling()
    yield llm
    llm.shutdown()


Strike = Callable[[AsyncLLM], Awaitable[None]]


def pids_of(llm: AsyncLLM, number: int, *names: str) -> list[int]:
    """The processes of a replica, or those of these actors."""
    found = next(one.pids for one in llm.health().replicas if one.number == number)
    return [pid for name, pid in found.items() if not names or name in names]


def killing(*names: str) -> Strike:
    async def strike(llm: AsyncLLM) -> None:
        kill(pids_of(llm, 0, *names))

    return strike


async def kill_while_it_moves(llm: AsyncLLM) -> None:
    await llm.drain_replica(0)
    kill(pids_of(llm, 0))
    await llm.drain_replica(0, is_draining=False)


async def kill_the_adopter(llm: AsyncLLM) -> None:
    before = moved(llm)
    kill(pids_of(llm, 0))
    await until(lambda: moved(llm) > before or not llm.health().replicas[0].num_requests)
    kill(pids_of(llm, 1))


EVENTS: dict[str, Strike] = {
    "scheduler": killing("scheduler"),
    "worker": killing("worker0"),
    "both": killing("scheduler", "worker0"),
    "during a move": kill_while_it_moves,
    "the adopter dies": kill_the_adopter,
}


@pytest.fixture(scope="module")
async def undisturbed(fleet: AsyncLLM) -> dict[str, Told]:
    return await run_all(fleet)


@pytest.fixture(scope="module")
async def long_tokens(fleet: AsyncLLM) -> list[int]:
    """Of the request that is aborted, or whose deadline passes."""
    return list((await fleet.complete(PROMPTS[0], LONG)).outputs[0].token_ids)


async def run_every_kind(
    llm: AsyncLLM,
    strike: Strike,
    undisturbed: dict[str, Told],
    long_tokens: list[int],
    at_token: int,
    victim: int = 0,
    num_moves: int = 0,
) -> None:
    """Requests of all kinds at once; the event comes when one of them has so many tokens.

    victim: the replica of those that are pinned. num_moves: sequences that go on elsewhere at least.
    """
    num_moved = moved(llm)
    last: dict[str, RequestOutput] = {}
    pinned: dict[str, Told] = {}

    async def read(name: str, **more: Any) -> None:
        stream = llm.generate(PROMPTS[0], LONG, **more)
        async for output in stream:
            last[name] = output
            if "aborted" in name and len(output.outputs[0].token_ids) >= NUM_BEFORE_ABORT:
                stream.abort()

    async def read_pinned() -> None:
        pinned.update(await run_all(llm, data_parallel_rank=victim))

    with anyio.fail_after(240):
        async with anyio.create_task_group() as group:
            group.start_soon(read_pinned)
            for rank in (None, victim):
                group.start_soon(partial(read, f"aborted {rank}", data_parallel_rank=rank))
                group.start_soon(partial(read, f"deadline {rank}", data_parallel_rank=rank, timeout=DEADLINE_S))
            found = await run_all(llm, at_token, lambda: strike(llm))
    assert_same(found, undisturbed)
    assert_same(pinned, undisturbed)
    assert moved(llm) - num_moved >= num_moves
    assert {"aborted None", f"aborted {victim}"} <= set(last), "a deadline may pass before the first token"
    for name, output in last.items():
        (end,) = output.outputs
        assert end.token_ids == long_tokens[: len(end.token_ids)], name
        if "deadline" in name and end.finish_reason == "length":  # only if that came sooner
            metrics = output.metrics
            assert metrics is not None
            assert metrics.finished_time is not None
            assert metrics.finished_time - metrics.arrival_time < DEADLINE_S
        else:
            assert (end.finish_reason, end.stop_reason) == ("abort", "deadline" if "deadline" in name else None), name


@pytest.mark.anyio
@pytest.mark.parametrize(("event", "at_token"), each_value(list(EVENTS), [1, 30]))
async def test_every_kind_of_request_outlives(
    fleet: AsyncLLM, undisturbed: dict[str, Told], long_tokens: list[int], event: str, at_token: int
) -> None:
    await all_run(fleet)
    num_moves = NUM_LONG if at_token > 1 else 1
    await run_every_kind(fleet, EVENTS[event], undisturbed, long_tokens, at_token, num_moves=num_moves)


async def lose(llm: AsyncLLM) -> None:
    kill(pids_of(llm, 0, "scheduler"))
    await until(lambda: llm.health().replicas[0].state == "lost")


@pytest.fixture
def first_death_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor gives a replica up with its first death; what is pinned waits until it is made anew."""
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: RestartLimits(max_deaths=1))


@pytest.mark.anyio
@pytest.mark.usefixtures("first_death_is_the_last")
async def test_every_kind_outlives_a_replica_that_is_lost(undisturbed: dict[str, Told], long_tokens: list[int]) -> None:
    llm = await start(enable_prompt_embeds=True)
    await run_every_kind(llm, lose, undisturbed, long_tokens, 20, num_moves=NUM_LONG)
    llm.shutdown()


@asynccontextmanager
async def starting(llm: AsyncLLM) -> AsyncIterator[Strike]:
    """Replica 1 starts meanwhile. Yields what kills it; it has requests that are pinned to it then, and starts once more."""
    await all_run(llm)
    await llm.scale(1)

    async def strike(llm: AsyncLLM) -> None:
        await until(lambda: llm.health().replicas[1].num_requests)
        assert llm.health().replicas[1].state == "starting"
        kill(pids_of(llm, 1))

    async with anyio.create_task_group() as group:
        group.start_soon(llm.scale, 2)
        await until(lambda: len(llm.health().replicas) == 2 and len(pids_of(llm, 1)) == 2)
        yield strike


@pytest.mark.anyio
async def test_every_kind_outlives_a_death_during_the_start(
    fleet: AsyncLLM, undisturbed: dict[str, Told], long_tokens: list[int]
) -> None:
    """Also requests that are pinned to the replica that starts."""
    async with starting(fleet) as strike:
        await run_every_kind(fleet, strike, undisturbed, long_tokens, 1, victim=1)


@pytest.fixture(scope="module")
def vectors() -> tuple[list[str], list[Any]]:
    texts = [f"Once upon a time, number {number}, there was a king" * 3 for number in range(40)]
    with LLM("storyteller", runner="pooling", dtype="float32", num_threads=1) as one:
        return texts, [output.outputs.data for output in one.encode(texts, pooling_task="embed", use_tqdm=False)]


async def run_every_vector(
    llm: AsyncLLM, strike: Strike, vectors: tuple[list[str], list[Any]], after: int, victim: int = 0
) -> None:
    """Texts of all kinds at once, every second one pinned; the event comes when so many have their vectors."""
    num_moved = moved(llm)
    texts, wanted = vectors
    found: dict[int, Any] = {}
    codes: dict[str, str] = {}
    asked: set[str] = set()
    is_time = anyio.Event()

    async def encode(number: int) -> None:
        pin = {"data_parallel_rank": victim} if number % 2 else {}
        async for output in llm.encode(texts[number], **pin):
            found[number] = output.outputs.data
        if len(found) == after:
            is_time.set()

    async def end_early(kind: str, **more: Any) -> None:
        stream = llm.encode(texts[0], request_id=kind, data_parallel_rank=victim, **more)
        asked.add(kind)
        async for output in stream:
            codes[kind] = "none" if output.error is None else output.error.code

    with anyio.fail_after(240):
        async with anyio.create_task_group() as group:
            for number in range(len(texts)):
                group.start_soon(encode, number)
            group.start_soon(end_early, "aborted")
            group.start_soon(partial(end_early, "late", timeout=0.01))
            await is_time.wait()
            await strike(llm)
            await llm.abort("aborted")
            group.start_soon(end_early, "aborted while it is dead")
            group.start_soon(partial(end_early, "late while it is dead", timeout=0.01))
            await until(lambda: "aborted while it is dead" in asked)
            await llm.abort("aborted while it is dead")
    for number, vector in enumerate(wanted):
        assert np.allclose(found[number], vector, atol=1e-4), number
    assert codes["aborted"] in ("abort", "none"), "it may have its vector before"
    assert codes["late"] in ("deadline", "none")
    assert codes["aborted while it is dead"] == "abort"
    assert codes["late while it is dead"] == "deadline"
    if victim == 0:
        assert moved(llm) > num_moved


@pytest.mark.anyio
@pytest.mark.parametrize("event", EVENTS)
async def test_vectors_outlive(pooling: AsyncLLM, vectors: tuple[list[str], list[Any]], event: str) -> None:
    await all_run(pooling)
    await run_every_vector(pooling, EVENTS[event], vectors, after=5)


@pytest.mark.anyio
@pytest.mark.usefixtures("first_death_is_the_last")
async def test_vectors_outlive_a_replica_that_is_lost(vectors: tuple[list[str], list[Any]]) -> None:
    llm = await start_pooling()
    await run_every_vector(llm, lose, vectors, after=5)
    llm.shutdown()


@pytest.mark.anyio
async def test_vectors_outlive_a_death_during_the_start(
    pooling: AsyncLLM, vectors: tuple[list[str], list[Any]]
) -> None:
    async with starting(pooling) as strike:
        await run_every_vector(pooling, strike, vectors, after=1, victim=1)
