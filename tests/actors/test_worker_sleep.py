"""What a worker does of sleep and waking while other calls come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from actorllm.actors.worker import WorkerActor
from actorllm.types.weight_version import WeightSource

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Runner:
    """Weights are the names of their versions."""

    def __init__(self) -> None:
        self.weights = "0"

    def stage_waking(self, source: WeightSource) -> str:
        return source.version

    stage_weights = stage_waking

    def commit_weights(self, staged: str) -> None:
        self.weights = staged

    def release_weights(self, source: WeightSource, *, keeps_pages: bool) -> None:
        self.weights = "none"

    def release_cache(self) -> None: ...
    def restore_cache(self) -> None: ...

    def resident_bytes(self) -> int:
        return 0


class SlowWorker(WorkerActor):
    """Reads for as long as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = self.made = Runner()  # type: ignore[assignment]
        self.reads: list[anyio.Event] = []

    async def _read_aside(self, read: Callable[[], Any]) -> Any:
        found, goes_on = read(), anyio.Event()
        self.reads.append(goes_on)
        await goes_on.wait()
        return found


async def test_weights_that_were_read_before_an_update_do_not_wake_after_it() -> None:
    """A scheduler has asked to wake, and ended. The next one updates, and lets the engine sleep again."""
    worker = SlowWorker()
    worker._sleep(1)
    left: list[Any] = []

    async def wake() -> None:
        left.append(await worker.answer("wake_up", {"tags": ["weights", "kv_cache"]}))

    async def update() -> None:
        await worker.answer("commit_weights", {"source": WeightSource("new", "1").to_tree()})

    async with anyio.create_task_group() as waking:
        waking.start_soon(wake)
        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as updating:
            updating.start_soon(update)
            await anyio.wait_all_tasks_blocked()
            worker.reads[1].set()
        assert worker.made.weights == "new"
        worker._sleep(1)
        worker.reads[0].set()
    assert (worker.made.weights, left) == ("none", [["weights"]])
    async with anyio.create_task_group() as waking:
        waking.start_soon(wake)
        await anyio.wait_all_tasks_blocked()
        worker.reads[2].set()
    assert (worker.made.weights, left[1]) == ("new", [])
