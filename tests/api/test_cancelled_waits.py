"""A task that waits until the engine has stopped is cancelled by asyncio itself, as by `asyncio.timeout`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from actorllm.testing import ScriptedAsyncLLM


async def leave(llm: ScriptedAsyncLLM) -> None:
    await llm.__aexit__()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "wait", "state"), [("unload", ScriptedAsyncLLM.unload, "new"), ("shutdown", leave, "stopped")]
)
async def test_the_wait_ends_when_everything_has_stopped(
    monkeypatch: pytest.MonkeyPatch, name: str, wait: Callable[..., object], state: str
) -> None:
    llm = ScriptedAsyncLLM(["x"])
    await llm.start()
    gate, stop = threading.Event(), getattr(llm._engine, name)

    def slow(timeout: float) -> None:
        assert gate.wait(50)
        stop(timeout)

    monkeypatch.setattr(llm._engine, name, slow)
    task = asyncio.ensure_future(wait(llm))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert llm.health().state == state
    llm.shutdown()


@pytest.mark.asyncio
async def test_asyncios_timeout_is_told() -> None:
    llm = ScriptedAsyncLLM(["x"])
    await llm.start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await llm.unload()
    assert llm.health().state == "new"
    llm.shutdown()
