"""Doorbells: sticky, watched by a loop without spinning, closed in the right order."""

from __future__ import annotations

import asyncio
import os
import threading

import anyio
import anyio.abc
import pytest

from actorllm.errors import PeerLostError
from actorllm.ring.doorbell import Doorbell
from tests.ring.polls import Polls, pass_by


def test_it_is_sticky_and_clears() -> None:
    bell = Doorbell.create()
    assert not bell.clear()
    bell.ring()
    bell.ring()
    assert bell.clear()
    assert not bell.clear()
    bell.close()
    bell.close()


def test_a_saturated_counter_still_rings() -> None:
    bell = Doorbell.create()
    os.eventfd_write(bell.fd, 2**64 - 2)
    bell.ring()
    assert bell.clear()
    bell.close()


def test_a_descriptor_from_elsewhere_is_made_safe() -> None:
    fd = os.eventfd(0, 0)
    os.set_inheritable(fd, True)
    bell = Doorbell.from_fd(fd)
    assert not os.get_inheritable(fd)
    assert not os.get_blocking(fd)
    bell.close()


async def test_watch_calls_back_for_every_ring_of_another_thread() -> None:
    bell = Doorbell.create()
    other = bell.duplicate()
    rung = asyncio.Event()
    calls = 0

    def callback() -> None:
        nonlocal calls
        calls += 1
        assert bell.clear()
        rung.set()

    bell.watch(callback)
    for _ in range(3):
        thread = threading.Thread(target=other.ring)
        thread.start()
        await asyncio.wait_for(rung.wait(), 5)
        rung.clear()
        thread.join()
    assert calls == 3
    bell.unwatch()
    other.ring()
    await pass_by()
    assert calls == 3
    assert not bell.is_watched
    bell.close()
    other.close()


async def test_rung_before_the_watch_is_heard() -> None:
    bell = Doorbell.create()
    bell.ring()
    heard = asyncio.Event()
    bell.watch(lambda: (bell.clear(), heard.set()))
    await asyncio.wait_for(heard.wait(), 5)
    with pytest.raises(RuntimeError, match="already"):
        bell.watch(heard.set)
    bell.close()


async def test_closing_leaves_no_registration_that_spins() -> None:
    """A duplicate keeps the epoll entry alive: without remove_reader before close the loop would turn for ever."""
    calls: list[None] = []
    polls = Polls()
    bell = Doorbell.create()
    other = bell.duplicate()
    bell.watch(lambda: calls.append(None))
    bell.close()
    other.ring()
    await polls.pass_by()
    assert calls == []
    polls.close()
    other.close()


async def test_call_soon_needs_a_watching_loop() -> None:
    bell = Doorbell.create()
    called = asyncio.Event()
    with pytest.raises(RuntimeError, match="not watched"):
        bell.call_soon(called.set)
    bell.watch(bell.clear)
    bell.call_soon(called.set)
    await asyncio.wait_for(called.wait(), 5)
    bell.close()


def test_a_watch_outlives_its_loop() -> None:
    bell = Doorbell.create()

    async def main() -> None:
        bell.watch(bell.clear)

    asyncio.run(main())
    bell.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_wait_works_on_every_backend(backend: str) -> None:
    async def main() -> None:
        bell = Doorbell.create()
        other = bell.duplicate()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, other.ring)
            with anyio.fail_after(30):
                await bell.wait()
        with anyio.fail_after(30):
            await bell.wait()  # still ringing
        assert bell.clear()
        other.close()
        bell.close()
        with pytest.raises(PeerLostError):
            await bell.wait()

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closing_ends_a_wait(backend: str) -> None:
    async def main() -> None:
        bell = Doorbell.create()

        async def waiter(*, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            with pytest.raises(PeerLostError):
                await bell.wait()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                await tasks.start(waiter)
                await anyio.wait_all_tasks_blocked()
                bell.close()

    anyio.run(main, backend=backend)


def test_watch_refuses_trio() -> None:
    async def main() -> None:
        bell = Doorbell.create()
        with pytest.raises(RuntimeError):
            bell.watch(bell.clear)
        bell.close()

    anyio.run(main, backend="trio")
