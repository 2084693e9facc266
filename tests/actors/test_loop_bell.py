"""Functions handed to an asyncio loop by other threads: order, errors, turns within turns, and the descriptor's life."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
from typing import Any

import pytest
import uvloop

from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.loop_bell import LoopBell

pytestmark = pytest.mark.skipif(
    not hasattr(os, "eventfd"),
    reason="the bell needs os.eventfd, which Linux has; elsewhere call_soon_threadsafe of the loop is used, as for uvloop and trio",
)


def eventfds() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            continue  # that of the listing itself
    return {one for one in found if one.endswith("[eventfd]")}


def test_functions_of_each_thread_run_once_and_in_order() -> None:
    async def main() -> list[tuple[int, int]]:
        bell = LoopBell(asyncio.get_running_loop())
        seen: list[tuple[int, int]] = []
        finished = asyncio.Event()

        def hand_over(thread: int) -> None:
            for number in range(2000):
                bell.call(seen.append, ((thread, number),))

        def wait_for_all(threads: list[threading.Thread]) -> None:
            for thread in threads:
                thread.join()
            bell.call(finished.set, ())

        threads = [threading.Thread(target=hand_over, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        waiting = asyncio.create_task(asyncio.to_thread(wait_for_all, threads))
        await finished.wait()
        await waiting
        return seen

    seen = asyncio.run(main())
    for thread in range(3):
        assert [number for one, number in seen if one == thread] == list(range(2000))


def test_what_a_function_raises_is_the_loops_and_costs_the_others_nothing() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        bell = LoopBell(loop)
        told: list[Any] = []
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        finished = asyncio.Event()

        def fail() -> None:
            raise ValueError("by the test")

        for function in (fail, fail, finished.set):
            bell.call(function, ())
        await finished.wait()
        assert [str(error) for error in told] == ["by the test"] * 2

    asyncio.run(main())


def test_a_function_that_hands_over_more_lets_the_loop_turn() -> None:
    async def main() -> None:
        bell = LoopBell(asyncio.get_running_loop())
        number = 0
        finished = asyncio.Event()

        def again() -> None:
            nonlocal number
            number += 1
            (finished.set if number == 100 else lambda: bell.call(again, ()))()

        bell.call(again, ())
        others = 0
        while not finished.is_set():
            await asyncio.sleep(0)
            others += 1
        assert others >= 99

    asyncio.run(main())


def test_a_loop_that_turns_within_a_function_runs_the_others_once() -> None:
    """As nest_asyncio makes it do."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        bell = LoopBell(loop)
        seen: list[int] = []
        finished = asyncio.Event()
        bell.call(lambda: (bell.call(seen.append, (3,)), loop._run_once()), ())
        for number in (1, 2):
            bell.call(seen.append, (number,))
        bell.call(lambda: bell.call(finished.set, ()), ())
        running = asyncio.current_task()
        asyncio._leave_task(loop, running)  # type: ignore[arg-type]
        try:
            loop._run_once()
        finally:
            asyncio._enter_task(loop, running)  # type: ignore[arg-type]
        await finished.wait()
        assert seen == [1, 2, 3]

    asyncio.run(main())


def test_nothing_of_the_application_is_kept_alive() -> None:
    """Its context variables are not, and the descriptor ends with the loop."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def main() -> str:
        variable.set("of the application")
        host = HostLoop.current()
        host.waiter()
        got: list[str] = []
        finished = asyncio.Event()
        for function in (lambda: got.append(variable.get()), finished.set):
            assert host.call_soon_threadsafe(function)
        await finished.wait()
        assert len(eventfds() - before) == 1
        return got[0]

    before = eventfds()
    for _ in range(3):
        assert asyncio.run(main()) == "unset"
    gc.collect()
    assert eventfds() <= before


def test_loops_of_another_kind_are_woken_by_their_own_means() -> None:
    async def main() -> bool:
        return LoopBell.fits(asyncio.get_running_loop())

    class CountingLoop(asyncio.SelectorEventLoop):
        pass

    assert asyncio.run(main())
    for factory in (uvloop.new_event_loop, CountingLoop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert not runner.run(main())
