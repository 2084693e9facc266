"""`LoopBell`: functions handed to an asyncio loop by other threads, with one descriptor that is rung for all that wait.

`call_soon_threadsafe` of asyncio's own loop makes a handle, writes to a socket, and reads that socket until it is empty. A ring
of an eventfd is one write and one read. For a stream of tokens the wake-ups are most of what an application pays.

Invariants: functions run on the loop, in the order of the calls, each once. What one of them raises reaches the loop as from any
callback, and those behind it still run. The descriptor lives as long as the loop, which holds the bell as a reader. A forked child
shares it with its parent, and is refused by the engine before it could ring. Used by `engine_thread.AsyncioLoop` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
from collections import deque
from collections.abc import Callable
from typing import Any


class LoopBell:
    """Of one loop. Made on that loop."""

    __slots__ = ("_fd", "_is_rung", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises OSError: there is no descriptor left."""
        self._fd = -1
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_rung = False
        # In an empty context: the caller's would be kept alive, with what the application has in it.
        contextvars.Context().run(loop.add_reader, self._fd, self._answer)

    @staticmethod
    def fits(loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it is asyncio's own loop, and not one that counts or replaces what wakes it."""
        return hasattr(os, "eventfd") and type(loop) is asyncio.SelectorEventLoop

    def call(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run it on the loop, soon. From any thread."""
        # SYNC POINT: here append, then look; in `_answer` clear, then take. What comes second sees the other's write.
        self._waiting.append((function, args))
        if not self._is_rung:
            self._ring()

    def _ring(self) -> None:
        self._is_rung = True
        os.eventfd_write(self._fd, 1)

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a loop that turned within a callback has answered this ring
            os.eventfd_read(self._fd)
        self._is_rung = False
        waiting = self._waiting
        num_left = len(waiting)  # what they hand over themselves has its turn after the loop's other callbacks
        try:
            while num_left and waiting:
                num_left -= 1
                function, args = waiting.popleft()
                function(*args)
        finally:
            if waiting and not self._is_rung:
                self._ring()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # modules may be gone as the interpreter ends
        if self._fd >= 0:
            close(self._fd)
