"""Event loops of asyncio that know when nothing is left to do: `VirtualLoop` for applications, `SettlingLoop` for engines.

A loop asks its selector to wait only when no callback is ready. There `VirtualLoop` moves its `VirtualTime` to what is due
next. `SettlingLoop` answers there whether everything is done that it was given before the question.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

POLL_S = 0.001
"""How often what moves virtual time looks again, in real seconds."""


class MovableTime(Protocol):
    """What a VirtualLoop asks of its VirtualTime."""

    def now(self) -> float: ...

    def is_settled(self) -> bool: ...

    def next_due(self) -> float: ...

    def move_to(self, moment: float) -> None: ...

    def wake_next(self) -> None: ...


class SettlingSelector(selectors.DefaultSelector):
    """Of a SettlingLoop."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[threading.Event] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.asked and timeout != 0:
            if found := super().select(0):
                return found
            for event in self.asked:
                event.set()
            self.asked.clear()
        return super().select(timeout)


class SettlingLoop(asyncio.SelectorEventLoop):
    """The loop of an engine's thread."""

    def __init__(self) -> None:
        self._settling = SettlingSelector()
        super().__init__(self._settling)

    def is_settled(self, timeout_s: float) -> bool:
        """From another thread: whether it finished, within these real seconds, everything that it was given before.

        A closed loop has.
        """
        event = threading.Event()
        try:
            self.call_soon_threadsafe(self._settling.asked.append, event)
        except RuntimeError:
            return True
        return event.wait(timeout_s)


class VirtualSelector(selectors.DefaultSelector):
    """Of a VirtualLoop: it moves time instead of waiting."""

    def __init__(self, time: MovableTime) -> None:
        super().__init__()
        self.num_outside = 0
        """Calls that executors work on."""
        self._time = time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        until = math.inf if timeout is None else self._time.now() + timeout
        while True:
            if found := super().select(0):
                return found
            if self.num_outside or not self._time.is_settled():
                if found := super().select(POLL_S):
                    return found
                continue
            if found := super().select(0):  # from an engine, before it was settled
                return found
            if self._time.next_due() < until:
                self._time.wake_next()
            elif until < math.inf:
                self._time.move_to(until)
                return []
            else:  # there is nothing but the world outside
                return super().select(POLL_S)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop of asyncio whose clock is a VirtualTime."""

    def __init__(self, time: MovableTime) -> None:
        self.virtual_time = time
        self._virtual = VirtualSelector(time)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self.virtual_time.now()

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._virtual.num_outside += 1
        future.add_done_callback(self._come_back)
        return future

    async def shutdown_default_executor(self, *args: Any, **keywords: Any) -> None:
        """Its limit counts in the time of this loop, which stands still meanwhile."""
        self._virtual.num_outside += 1
        try:
            await super().shutdown_default_executor(*args, **keywords)
        finally:
            self._virtual.num_outside -= 1

    def _come_back(self, _: object) -> None:
        self._virtual.num_outside -= 1


def is_virtual(time: MovableTime) -> bool:
    """Whether the calling code runs on a loop of this time."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return isinstance(loop, VirtualLoop) and loop.virtual_time is time


def run(time: MovableTime, main: Coroutine[Any, Any, T]) -> T:
    """See `VirtualTime.run`."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(time)) as runner:
        return runner.run(main)
