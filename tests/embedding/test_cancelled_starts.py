"""A start that is cancelled at any point leaves nothing; that no process, segment or descriptor is left is seen by a fixture."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.config import EngineConfig
from tests.embedding.host_program import children, wait_until

pytestmark = pytest.mark.usefixtures("processes_are_execed")


def has_loaded_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


POINTS: dict[str, Callable[[set[int], list[int]], bool]] = {
    "before anything": lambda pids, sizes: True,
    "one process is made": lambda pids, sizes: len(pids) >= 1,
    "both processes are made": lambda pids, sizes: len(pids) >= 2,
    "the worker loads": lambda pids, sizes: any(map(has_loaded_torch, pids)),
    "the worker is ready": lambda pids, sizes: len(sizes) > 0,
}
"""Of the processes of this start, and of what the worker has told."""


@pytest.mark.asyncio
@pytest.mark.parametrize("point", POINTS)
async def test_nothing_is_left(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    """Of the KV cache, which the worker tells before the links are made."""
    resolved = EngineConfig.resolved

    def note(config: EngineConfig, num_blocks: int, *facts: Any, **named: Any) -> EngineConfig:
        sizes.append(num_blocks)
        return resolved(config, num_blocks, *facts, **named)

    monkeypatch.setattr(EngineConfig, "resolved", note)
    threads, others = set(threading.enumerate()), set(children())

    def pids() -> set[int]:
        """An earlier test may have left some that end meanwhile."""
        return set(children()) - others

    llm = AsyncLLM("storyteller", num_threads=1)
    start = asyncio.create_task(llm.start())
    while not (POINTS[point](pids(), sizes) or start.done()):  # on a busy machine it takes as long as the test may
        await asyncio.sleep(0.001)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not pids()
    if point == "the worker loads":  # and it can be started again
        output = await llm.complete("Once", SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
    llm.shutdown()

    def left() -> set[str]:
        return {thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("actorllm")}

    assert wait_until(lambda: not left()), left()
