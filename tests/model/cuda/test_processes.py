"""Streams of a worker process that launches ahead go on over the deaths of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM
from actorllm.actors.topology import engine_topology
from tests.model.cuda.host_engine import ARGUMENTS
from tests.model.cuda.host_processes import on_the_host, tell


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch, folder: Callable[..., Path]) -> Iterator[Callable[..., AsyncLLM]]:
    path, engines = folder(), []

    def make(**arguments: Any) -> AsyncLLM:
        engines.append(AsyncLLM(str(path), **(ARGUMENTS | arguments)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.mark.timeout(120)
async def test_streams_go_on_over_deaths(make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the scheduler, whose steps the worker still computes, and of the worker, which learns everything again."""
    expected = await tell(make_llm())
    monkeypatch.setattr(
        actorllm.client.engine_supervisor, "engine_topology", lambda config: on_the_host(engine_topology(config))
    )
    llm = make_llm(topology="process")
    await llm.start()
    assert await tell(llm, ("scheduler",)) == expected
    assert await tell(llm, ("worker0",)) == expected
