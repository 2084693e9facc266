"""Streams of a worker process that launches ahead go on over the deaths of processes."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import actorllm.client.engine
from actorllm import AsyncLLM, SamplingParams
from actorllm.actors.topology import Topology, engine_topology
from tests.model.cuda.test_pipeline import ARGUMENTS
from tests.model.cuda.twins import prompt

NUM_STREAMS = 5


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def on_the_host(topology: Topology) -> Topology:
    actors = tuple(
        dataclasses.replace(a, path="tests.model.cuda.host_worker:HostWorkerActor")
        if a.name.startswith("worker")
        else a
        for a in topology.actors
    )
    return dataclasses.replace(topology, actors=actors)


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch, folder: Callable[..., Path]) -> Iterator[Callable[..., AsyncLLM]]:
    path, engines = folder(), []

    def make(**arguments: Any) -> AsyncLLM:
        engines.append(AsyncLLM(str(path), **(ARGUMENTS | arguments)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


async def tell(llm: AsyncLLM, victims: tuple[str, ...] = ()) -> list[list[int]]:
    """What all streams bring; the victims are killed in the middle."""
    told: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
    to_kill = list(victims)

    async def listen(i: int) -> None:
        penalty = {"repetition_penalty": 1.4} if i == 2 else {}
        params = SamplingParams(
            max_tokens=40, temperature=i / 4, seed=i, ignore_eos=True, detokenize=False, top_p=1 - i / 20, **penalty
        )
        async for output in llm.generate({"prompt_token_ids": prompt(20 + 10 * i, i)}, params):
            told[i] = list(output.outputs[0].token_ids)
            if to_kill and len(told[i]) >= 8:
                os.kill(llm._engine.pids[to_kill.pop()], signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        for i in range(NUM_STREAMS):
            tasks.start_soon(listen, i)
    return told


@pytest.mark.timeout(120)
async def test_streams_go_on_over_deaths(make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the scheduler, whose steps the worker still computes, and of the worker, which learns everything again."""
    expected = await tell(make_llm())
    monkeypatch.setattr(actorllm.client.engine, "engine_topology", lambda config: on_the_host(engine_topology(config)))
    llm = make_llm(topology="process")
    await llm.start()
    assert await tell(llm, ("scheduler",)) == expected
    assert await tell(llm, ("worker0",)) == expected
