"""`RealTime` and `VirtualTime`: what the steps of a scripted worker wait for.

Only steps wait for it. Timers of the application, `timeout=` and `deadline=` of requests are in real time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio

from actorllm.actors.engine_thread import HostLoop
from actorllm.clock import now
from actorllm.errors import InvalidParameterError

POLL_S = 0.001


class RealTime:
    """Seconds are those of the monotonic clock."""

    def now(self) -> float:
        return now()

    async def wait_until(self, due: float) -> None:
        await anyio.sleep(max(0.0, due - now()))


class VirtualTime:
    """Stands still, but for `advance`. Of one engine; usable from any thread."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        self._waiting: dict[object, tuple[float, Callable[[], object]]] = {}
        self.is_idle: Callable[[], bool] = lambda: True
        """Whether no request is open; set by the engine that uses this time."""

    def now(self) -> float:
        return self._now

    async def wait_until(self, due: float) -> None:
        """For the worker: returns when the time has come."""
        key, event, host = object(), anyio.Event(), HostLoop.current()
        with self._lock:
            if due <= self._now:
                return
            self._waiting[key] = due, lambda: host.call_soon_threadsafe(event.set)
        try:
            await event.wait()
        finally:
            with self._lock:
                self._waiting.pop(key, None)

    async def advance(self, seconds: float) -> None:
        """Let so many seconds pass: returns when every step within them is computed.

        Costs only the time of the computation. Raises InvalidParameterError for seconds below 0.
        """
        if not seconds >= 0:
            raise InvalidParameterError(f"seconds={seconds!r} must be at least 0")
        target = self._now + seconds
        while True:
            while not self._waiting and not self.is_idle():  # noqa: ASYNC110 - requests end on other threads, and tell no event
                await anyio.sleep(POLL_S)
            with self._lock:
                due = min((due for due, _ in self._waiting.values()), default=target + 1)
                self._now = min(due, target)
                woken = [key for key, (at, _) in self._waiting.items() if at <= self._now]
                wakers = [self._waiting.pop(key)[1] for key in woken]
            if not wakers:
                return
            for wake in wakers:
                wake()
