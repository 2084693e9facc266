"""A worker is killed, and the process that is parked for it at the same time: another worker is started from nothing."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

from actorllm import AsyncLLM
from actorllm.supervision.standby import Standby, StandbyOptions
from tests.hostile.bystander import bystander
from tests.hostile.scripted import scripted_engine


async def parked_pid(llm: AsyncLLM) -> int:
    """Once a process is parked that has loaded everything."""
    standby = llm._engine._supervisor._standby  # type: ignore[union-attr]
    assert isinstance(standby, Standby)
    while not standby.num_parked:
        await anyio.sleep(0.002)
    return llm._engine.pids["parked worker0"]


@pytest.mark.parametrize("standby_worker", [True, None])
async def test_both_at_once(standby_worker: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked at once or, by default, after a while, of which the test does not wait for the end."""
    monkeypatch.setattr("actorllm.supervision.standby.PARK_AFTER_S", 0.0)
    with scripted_engine(standby_worker=standby_worker) as llm:
        async with bystander(llm, max_tokens=60) as steady:
            first = llm._engine.pids["worker0"]
            parked = await parked_pid(llm)
            assert os.getpriority(os.PRIO_PROCESS, parked) == 0, "it is to work as others do"
            supervisor = (await llm.stats())["supervisor"]
            assert supervisor["num_parked"] == 1
            assert 2**20 < supervisor["parked_memory_bytes"] < 2**31
            for pid in (first, parked):
                os.kill(pid, signal.SIGKILL)
            while llm.health().num_recoveries == 0:
                await anyio.sleep(0.002)
            assert llm._engine.pids["worker0"] not in (first, parked)
            await steady.wait(2)
            another = await parked_pid(llm)
            assert another != parked
            os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
            while llm.health().num_recoveries == 1:
                await anyio.sleep(0.002)
            assert llm._engine.pids["worker0"] == another
            await steady.wait(2)


async def test_there_may_be_none() -> None:
    with scripted_engine(standby_worker=False) as llm:
        await llm.start()
        assert (await llm.stats())["supervisor"]["num_parked"] == 0
        assert llm._engine._supervisor._standby is None  # type: ignore[union-attr]


async def test_none_is_parked_without_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    has_looked = anyio.Event()

    def available_bytes() -> int:
        has_looked.set()
        return 1 << 30

    monkeypatch.setattr("actorllm.supervision.standby.available_bytes", available_bytes)
    monkeypatch.setattr(StandbyOptions, "of", lambda config: StandbyOptions("workers", 0.01, 2 << 30))
    with scripted_engine() as llm:
        await llm.start()
        while not has_looked.is_set():
            await anyio.sleep(0.002)
        assert list(llm._engine.pids) == ["scheduler", "worker0"]
