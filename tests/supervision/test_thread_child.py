"""`ThreadChild`: an actor on a thread of this process."""

from __future__ import annotations

import anyio
import pytest

from actorllm.actors.actor import Actor, Runner
from actorllm.actors.engine_thread import current_loop
from actorllm.actors.topology import ActorSpec
from actorllm.supervision.children import ThreadChild


class Idle(Actor):
    """Does nothing."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_start_that_is_cancelled_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was shut down while it started once left five descriptors: those of the loop of such a thread."""

    async def never(self: Runner, on_alive: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(Runner, "live", never)
    spec = ActorSpec("worker0", "tests.supervision.test_thread_child:Idle", placement="thread")
    child = ThreadChild(spec, lambda *_: None, current_loop())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.spawn, tasks, None)
        while child._thread.loop is None:
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert not child._thread.is_alive
