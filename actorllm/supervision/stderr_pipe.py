"""`StderrPipe`: what a process of the engine writes to stderr and stdout.

Owns the reading end of its pipe. Everything is shown on the owner's stderr. The last lines are kept for the report of the
process's death. Nothing here blocks. Used by ProcessChild, on the engine's loop.
"""

from __future__ import annotations

import os
import select
from collections import deque

from actorllm.actors.engine_thread import AsyncioLoop

MAX_LAST_WORDS = 250
"""Lines of a process's stderr that are kept: two stacks as `faulthandler` writes them, of at most 100 frames each."""
MAX_LINE = 500
"""Characters of such a line."""
MAX_STDERR_BACKLOG = 1 << 16
"""Bytes of stderr that wait while the owner's own stderr takes no more; the rest is cut, and the cut is reported."""

RETRY_S = 0.1
"""How soon what the owner's stderr did not take is written again."""


class StderrPipe:
    """What a process writes to stderr (and stdout): shown on the owner's stderr, the last lines kept.

    Forwarding never blocks the loop: while the owner's stderr takes nothing, up to MAX_STDERR_BACKLOG bytes wait.
    """

    def __init__(self, loop: AsyncioLoop, fd: int) -> None:
        self.num_cut = 0
        """Bytes that were never shown."""
        self._loop = loop
        self._fd = fd
        self._lines: deque[str] = deque(maxlen=MAX_LAST_WORDS)
        self._line = b""
        self._backlog = bytearray()
        self._num_cut_now = 0
        self._is_timer_set = False
        os.set_blocking(fd, False)
        loop.watch(fd, self.drain)

    def drain(self) -> None:
        """Take what is there."""
        for _ in range(64):  # a process that only writes must not hold the loop
            if self._fd < 0:
                return
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self._close_pipe()
                break
            *lines, self._line = (self._line + data).split(b"\n")
            self._line = self._line[:MAX_LINE]
            self._lines.extend(_text(line) for line in lines if line.strip())
            self._backlog += data
        self._forward()

    def last_lines(self) -> tuple[str, ...]:
        rest = (_text(self._line),) if self._line.strip() else ()
        return (*self._lines, *rest)[-MAX_LAST_WORDS:]

    def close(self) -> None:
        self._close_pipe()
        self._forward()
        self.num_cut += len(self._backlog)
        self._backlog.clear()

    def _close_pipe(self) -> None:
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _forward(self) -> None:
        backlog = self._backlog
        try:
            while backlog and _is_writable(2):
                if self._num_cut_now:
                    backlog[:0] = b"[%d bytes of stderr cut]\n" % self._num_cut_now
                    self._num_cut_now = 0
                del backlog[: os.write(2, backlog[: select.PIPE_BUF])]
        except OSError:
            self.num_cut += len(backlog)  # the owner has no stderr
            backlog.clear()
        if len(backlog) > MAX_STDERR_BACKLOG:
            num_cut = len(backlog) - MAX_STDERR_BACKLOG
            del backlog[:num_cut]
            self.num_cut += num_cut
            self._num_cut_now += num_cut
        if backlog and self._fd >= 0 and not self._is_timer_set:
            self._is_timer_set = True
            self._loop.call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._is_timer_set = False
        self._forward()


def _text(line: bytes) -> str:
    return line[:MAX_LINE].decode(errors="replace").rstrip()


def _is_writable(fd: int) -> bool:
    """A pipe that is reported writable takes PIPE_BUF bytes without blocking."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))
