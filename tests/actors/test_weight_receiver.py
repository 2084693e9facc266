"""What a rank does for new weights of a trainer: each job once, one at a time, beside the loop."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import anyio
import pytest
import torch

from actorllm.actors.call_values import encode_value
from actorllm.actors.weight_receiver import WeightReceiver
from actorllm.errors import EngineError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Config:
    replica, num_workers = 2, 3


class Held(WeightReceiver):
    """Its jobs wait."""

    def __init__(self) -> None:
        super().__init__(Config(), 1, None)  # type: ignore[arg-type]
        self.begun, self.released = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []

    def _leave(self) -> dict[str, Any]:
        self.threads.append(threading.current_thread())
        self.begun.set()
        self.released.wait()
        return super()._leave()


NOTHING = encode_value({}, "nothing")


async def test_a_job_that_is_asked_again_is_done_once() -> None:
    receiver = Held()
    answers: list[Any] = []

    async def ask() -> None:
        answers.append(await receiver.answer("one", "leave", NOTHING, has_loop=True))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
        await anyio.to_thread.run_sync(receiver.begun.wait)
        with pytest.raises(EngineError, match="with a transfer of before"):
            await receiver.answer("two", "number", NOTHING, has_loop=True)
        receiver.released.set()
    assert answers == [{}, {}]
    await ask()
    assert len(receiver.threads) == 1
    assert threading.current_thread() not in receiver.threads
    assert await receiver.answer("three", "number", NOTHING, has_loop=True) == {"number": 7, "is_joined": False}


async def test_where_there_is_no_loop_the_caller_does_it() -> None:
    receiver = Held()
    receiver.released.set()
    assert await receiver.answer("one", "leave", NOTHING, has_loop=False) == {}
    assert receiver.threads == [threading.current_thread()]


async def test_what_a_job_raises_is_its_answer() -> None:
    receiver = WeightReceiver(Config(), 0, None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(EngineError, match="this rank has met no trainer"):
            await receiver.answer("one", "receive", encode_value({"path": "/dev/null"}, "it"), has_loop=True)


async def test_a_job_that_failed_keeps_no_tensor() -> None:
    """It is kept until there is another one. What torch raised is the cause, with the frames in which that was."""
    buffers: list[weakref.ref[torch.Tensor]] = []

    class Failing(WeightReceiver):
        def _leave(self) -> dict[str, Any]:
            buffer = torch.empty(1)
            buffers.append(weakref.ref(buffer))
            try:
                raise RuntimeError("the connection is closed")
            except RuntimeError as error:
                raise EngineError("the trainer has ended") from error

    receiver = Failing(Config(), 0, None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(EngineError, match="the trainer has ended"):
            await receiver.answer("one", "leave", NOTHING, has_loop=True)
    assert [buffer() for buffer in buffers] == [None]
