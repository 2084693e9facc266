"""Calls of functions in the workers, as the engine makes them: what becomes of a call that fails on some ranks."""

from __future__ import annotations

import math
import os
from concurrent.futures import Future
from typing import Any

import anyio
import pytest

from actorllm.actors.call_values import encode_value
from actorllm.actors.memory_file import MemoryFile, told_of
from actorllm.client.collective_calls import Called, call_everywhere, result_within
from actorllm.errors import CollectiveCallError
from actorllm.ring import codec


class Answering:
    """In the place of an engine, whose two ranks answer so."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = [encode_value(answer, "the answer") for answer in answers]

    def starting(self) -> list[anyio.Event]:
        return []

    async def ask_all_schedulers(self, verb: str, **arguments: Any) -> Any:
        return memoryview(b"".join(codec.encode(None, self._answers)))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_weights_of_a_call_that_fails_on_another_rank_give_their_memory_back() -> None:
    memory = MemoryFile("weights", 1000)
    brought = {"value": None, "weights": told_of(memory.path)}
    assert (await call_everywhere(Answering(brought, {"value": None}), "f", b"")).weights == brought["weights"]
    assert os.fstat(memory.fd).st_size == 1000
    with pytest.raises(CollectiveCallError, match="rank 1: LookupError"):
        await call_everywhere(Answering(brought, {"error": "LookupError: no", "traceback": ""}), "f", b"")
    assert os.fstat(memory.fd).st_size == 0
    memory.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_weights_of_a_call_that_is_waited_for_no_longer_give_their_memory_back(is_cancelled: bool) -> None:
    """The caller is told of a time that is over, or has gone itself."""
    memory = MemoryFile("weights", 1000)
    calling: Future[Called] = Future()
    if is_cancelled:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await result_within(calling, "f", math.inf)
    else:
        with pytest.raises(TimeoutError, match=r"'f' has not returned within 1e-09 s; it goes on"):
            await result_within(calling, "f", 1e-9)
    assert os.fstat(memory.fd).st_size == 1000
    calling.set_result(Called([None], told_of(memory.path)))
    assert os.fstat(memory.fd).st_size == 0
    memory.close()


async def test_what_a_call_returns_or_raises_in_time_is_its_outcome() -> None:
    done: Future[Called] = Future()
    done.set_result(Called([3], None))
    assert (await result_within(done, "f", 60)).results == [3]
    failed: Future[Called] = Future()
    failed.set_exception(LookupError("no"))
    with pytest.raises(LookupError, match="no"):
        await result_within(failed, "f", math.inf)
