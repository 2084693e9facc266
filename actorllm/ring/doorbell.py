"""Wake-ups between processes: an eventfd that is rung, watched by the running loop, and cleared.

Owns the descriptor and the registration with the loop; the only module of the package that knows asyncio. A doorbell is
sticky: one that is rung before it is watched is found ringing. It says "look again", never how much there is.

Invariants:

- always non-blocking: libuv sets O_NONBLOCK on the open file description, so a peer's duplicate would otherwise change;
- the reader is removed from the loop before the descriptor is closed. An epoll entry lives as long as any duplicate does, and
  the loop would spin on it;
- close-on-exec, so that only pass_fds hands it on.

Two ways to wait: `watch` registers a persistent callback on asyncio or uvloop. It takes 9 µs from the peer's store to the
callback when asleep. `await wait()` works on trio too and costs twice as much.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import anyio

from actorllm.errors import PeerLostError, TransportError


class Doorbell:
    """One eventfd. The object owns the descriptor; the peer has its own object over a duplicate."""

    __slots__ = ("_loop", "_num_waiting", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_waiting = 0

    @classmethod
    def create(cls) -> Doorbell:
        if not hasattr(os, "eventfd"):
            raise TransportError("rings need eventfd (Linux); use topology='inline' on this platform")
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    @classmethod
    def from_fd(cls, fd: int) -> Doorbell:
        """Over a descriptor that another process created; the object owns it from now on."""
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        return cls(fd)

    def duplicate(self) -> Doorbell:
        """A second object over the same eventfd, with a descriptor of its own."""
        return Doorbell(os.dup(self.fd))

    def ring(self) -> None:
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            return  # the counter is at its maximum: it is ringing

    def clear(self) -> bool:
        """Stops the ringing; True if it was ringing. Always before looking at the ring, never after."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def watch(self, callback: Callable[[], object]) -> None:
        """Calls `callback` from the running asyncio or uvloop loop whenever it rings, until `unwatch`.

        The callback must clear the bell. RuntimeError when no such loop runs in this thread (trio: use `wait`), or when
        the bell is watched or waited for already: a loop keeps one callback per descriptor.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None or self._num_waiting:
            raise RuntimeError("the doorbell is watched or waited for already")
        loop.add_reader(self.fd, callback)
        self._loop = loop

    def unwatch(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self.fd)

    @property
    def is_watched(self) -> bool:
        return self._loop is not None

    @staticmethod
    def can_watch() -> bool:
        """An asyncio or uvloop loop runs in this thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Runs `callback` in the next turn of the loop that watches the bell."""
        if self._loop is None:
            raise RuntimeError("the doorbell is not watched")
        self._loop.call_soon(callback)

    async def wait(self) -> None:
        """Returns when it rings (or rang already); does not clear it. PeerLostError when it is closed meanwhile.

        One task at a time, and not while it is watched: RuntimeError.
        """
        if self.fd < 0:
            raise PeerLostError("the doorbell is closed")
        if self._loop is not None or self._num_waiting:
            raise RuntimeError("the doorbell is watched or waited for already")
        self._num_waiting += 1
        try:
            await anyio.wait_readable(self.fd)
        except anyio.ClosedResourceError as error:
            raise PeerLostError("the doorbell was closed while it was waited for") from error
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """May be called more than once."""
        if self.fd < 0:
            return
        self.unwatch()
        if self._num_waiting:
            anyio.notify_closing(self.fd)
        fd, self.fd = self.fd, -1
        os.close(fd)
