"""`RealTime` and `VirtualTime`: what the steps of a scripted worker wait for.

A step waits for a moment, and for news: of requests that were left meanwhile, for which it need not wait any more. Virtual
time stands still until something moves it: `advance`, or an event loop of its own (`VirtualTime.run`). Neither moves it while
an engine has something to do. `timeout=` and `deadline=` of requests count in the time of their engine.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import anyio
import anyio.lowlevel

from actorllm.actors.engine_thread import HostLoop
from actorllm.clock import now
from actorllm.errors import InvalidParameterError
from actorllm.testing import virtual_loop
from actorllm.testing.virtual_loop import POLL_S, VirtualLoop

T = TypeVar("T")


TURNS = 20
"""Of a loop of real time before `advance` looks: tasks that are ready submit their requests, and take what has come."""

FAR_S = 1e9
"""Added to moments of virtual time where seconds of the monotonic clock are expected: no clock of a machine comes so far."""


def deadline_of(due: float) -> float:
    """A moment of virtual time as the deadline of a request."""
    return FAR_S + due


def due_of(deadline: float) -> float:
    """The moment again, to the microsecond."""
    return round(deadline - FAR_S, 6)


class Timed(Protocol):
    """An engine that waits for virtual time."""

    def is_settled(self) -> bool:
        """Whether nothing happens in it until time moves, or its callers do something. May take some milliseconds."""


class RealTime:
    """Seconds are those of the monotonic clock."""

    def now(self) -> float:
        return now()

    async def wait_until(self, due: float, news: anyio.Event, owner: object) -> None:
        with anyio.move_on_after(max(0.0, due - now())):
            await news.wait()


class VirtualTime:
    """Stands still, but for `advance` and `run`. Of one or several engines; usable from any thread."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        self._steps: dict[object, tuple[float, Callable[[], object], object]] = {}
        """Those that wait: until when, what wakes them, and whose they are."""
        self._timers: dict[object, tuple[float, Callable[[], object], Callable[[], bool]]] = {}
        """When, what to call, and whether it is still wanted."""
        self._engines: WeakSet[Timed] = WeakSet()
        self._owners: dict[object, int] = {}
        """Of steps, with a number each: of what is due at once, the first one's goes first."""

    def now(self) -> float:
        """Seconds since it was made."""
        return self._now

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on an event loop of asyncio whose clock this is; returns its result.

        Time moves on to what is next, a step or a timer of the loop, when engines and tasks have nothing else to do.
        So `asyncio.sleep`, `asyncio.timeout` and anyio's scopes take no time. Calls of `asyncio.to_thread` and of the
        loop's executors are waited for. Sockets, processes and threads of anyio are not: time may move while they work.
        """
        return virtual_loop.run(self, main)

    def loop_factory(self) -> VirtualLoop:
        """The loop of `run`, for asyncio.Runner and for anyio's `("asyncio", {"loop_factory": time.loop_factory})`."""
        return VirtualLoop(self)

    async def advance(self, seconds: float) -> None:
        """Let so many seconds pass: returns when every step within them is computed.

        Tasks of the calling loop have some turns before each step. Costs only the time of the computation. Raises
        InvalidParameterError for seconds below 0.
        """
        if not 0 <= seconds < math.inf:
            raise InvalidParameterError(f"seconds={seconds!r} must be a finite number of at least 0")
        target = self._now + seconds
        if virtual_loop.is_virtual(self):
            await anyio.sleep(seconds)  # the loop moves it
            return
        while True:
            for _ in range(TURNS):
                await anyio.lowlevel.checkpoint()
            while not self.is_settled():  # noqa: ASYNC110 - engines settle on other threads, and tell no event
                await anyio.sleep(POLL_S)
            due = self.next_due()
            if due > target:
                break
            self.wake_next()
        self.move_to(target)

    # For engines

    def join(self, engine: Timed, owner: object) -> None:
        """Time moves only while this engine is settled. owner: of its steps."""
        with self._lock:
            self._engines.add(engine)
            self._owners[owner] = len(self._owners)

    async def wait_until(self, due: float, news: anyio.Event, owner: object) -> None:
        """Returns when the time has come, or there are news."""
        key, host = object(), HostLoop.current()
        with self._lock:
            if due <= self._now:
                return
            self._steps[key] = due, lambda: host.call_soon_threadsafe(news.set), owner
        try:
            await news.wait()
        finally:
            with self._lock:
                self._steps.pop(key, None)

    def call_at(self, due: float, function: Callable[[], object], is_wanted: Callable[[], bool]) -> None:
        """Call a function, on any thread, when the time has come and it is wanted then. Past moments have come."""
        with self._lock:
            self._timers[object()] = max(due, self._now), function, is_wanted

    def delays(self, owner: object) -> bool:
        """Whether a step of this owner waits."""
        with self._lock:
            return any(one is owner for _, _, one in self._steps.values())

    # For what moves it

    def is_settled(self) -> bool:
        """Whether every engine is. May take some milliseconds."""
        return all(engine.is_settled() for engine in list(self._engines))

    def next_due(self) -> float:
        """When the next step or timer is due; infinity: there is none."""
        with self._lock:
            self._timers = {key: timer for key, timer in self._timers.items() if timer[2]()}
            return min((due for due, *_ in [*self._steps.values(), *self._timers.values()]), default=math.inf)

    def move_to(self, moment: float) -> None:
        """Nothing is due before this moment. What is due then is not woken yet. Time never goes back."""
        with self._lock:
            self._now = max(self._now, moment)

    def wake_next(self) -> None:
        """Move to what is due next, and wake that alone: what is due at the same moment finds it done."""
        with self._lock:
            waiting = [(due, -1, key) for key, (due, *_) in self._timers.items()]
            waiting += [(due, self._owners[owner], key) for key, (due, _, owner) in self._steps.items()]
            if not waiting:
                return
            due, _, key = min(waiting, key=lambda entry: entry[:2])
            self._now = max(self._now, due)
            wake = (self._timers.pop(key) if key in self._timers else self._steps.pop(key))[1]
        wake()
