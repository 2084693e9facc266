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
from tests.model.cuda.mixtures import QWEN3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch, folder: Callable[..., Path]) -> Iterator[Callable[..., AsyncLLM]]:
    engines: list[AsyncLLM] = []

    def make(shape: dict[str, Any], **arguments: Any) -> AsyncLLM:
        engines.append(AsyncLLM(str(folder(**shape)), **(ARGUMENTS | arguments)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", [{}, QWEN3], ids=["dense", "experts"])
async def test_streams_go_on_over_deaths(
    shape: dict[str, Any], make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the scheduler, whose steps the worker still computes, and of the worker, which learns everything again."""
    expected = await tell(make_llm(shape))
    monkeypatch.setattr(
        actorllm.client.engine_supervisor, "engine_topology", lambda config: on_the_host(engine_topology(config))
    )
    llm = make_llm(shape, topology="process")
    await llm.start()
    assert await tell(llm, ("scheduler",)) == expected
    assert await tell(llm, ("worker0",)) == expected
