"""`EventRecord`: the events of one stream, numbered from 0, for readers that come and go.

Invariants: a number never changes. The bytes that are kept are bounded, beside those of the newest chunk. The oldest events go
first, and a reader that is behind them is told so. The number of readers is known, so that a stream without readers can be ended.
No I/O; used on the server's loop.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import anyio

from actorllm.clock import now
from actorllm.server.envelope import ApiError


class EventRecord:
    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of its events; what came last is kept whatever it has."""
        self.ended_at: float | None = None
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self._num_dropped = 0
        self._num_event_bytes = 0
        self._num_readers = 0
        self._news = anyio.Event()

    def add(self, chunk: bytes) -> None:
        """More events, as they go to a client. They all stay until others come: no reader could have had them before."""
        first = self._num_dropped + len(self._events)
        blocks = chunk.split(b"\n\n")[:-1]
        for number, block in enumerate(blocks, first):
            event = b"id: %d\n%b\n\n" % (number, block)
            self._events.append(event)
            self._num_event_bytes += len(event)
        while blocks and self._num_event_bytes > self._max_bytes and self._num_dropped < first:
            self._num_event_bytes -= len(self._events.popleft())
            self._num_dropped += 1
        self._tell()

    def end(self) -> None:
        """Nothing more is to come."""
        if self.ended_at is None:
            self.ended_at = now()
            self._tell()

    def forget_events(self) -> None:
        self._num_dropped += len(self._events)
        self._events.clear()
        self._num_event_bytes = 0

    def after(self, number: int) -> tuple[bytes, int]:
        """The events behind that number, and the number of the last one. Raises ApiError if they are no longer there."""
        first = number + 1 - self._num_dropped
        if first < 0:
            told = f"events up to {self._num_dropped - 1} are no longer kept; ask for the answer without stream, or ask anew"
            raise ApiError(400, told, "starting_after")
        last = self._num_dropped + len(self._events) - 1
        return b"".join(self._events[i] for i in range(first, len(self._events))), max(number, last)

    async def read_behind(self, number: int) -> tuple[bytes, int, bool]:
        """As `after`, once there is something; and whether that is all. Raises ApiError."""
        await self.wait_behind(number)
        is_over = self.ended_at is not None
        return *self.after(number), is_over

    @contextlib.contextmanager
    def being_read(self) -> Iterator[None]:
        """While a reader has it."""
        self._num_readers += 1
        self._tell()
        try:
            yield
        finally:
            self._num_readers -= 1
            self._tell()

    async def wait_behind(self, number: int) -> None:
        """Until there are events behind that number, or no more to come."""
        while self.ended_at is None and self._num_dropped + len(self._events) <= number + 1:
            await self._news.wait()

    async def wait_for_end(self) -> None:
        while self.ended_at is None:
            await self._news.wait()

    async def wait_unread(self, seconds: float) -> None:
        """Until it has had no reader for so long."""
        while True:
            while self._num_readers:
                await self._news.wait()
            with anyio.move_on_after(seconds):
                while not self._num_readers:
                    await self._news.wait()
                continue
            return

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()
