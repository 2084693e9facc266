"""`Heartbeat`: a page of memory in which a process shows that it lives and what it is at.

The actor's own process writes it with plain stores of aligned words, and the supervisor's process looks at it now and then.
Neither waits for the other, and no system call is made. What each word proves:

    BEATS     grows while the process's loop turns, four times a second when there is nothing to do
    STEPS     how many steps were begun: another value means another step
    STEP      the number of the step that computes now, during which the loop does not turn; 0: none does
    BUDGET    how many microseconds it may take (`StepBudget`)

That a process is stopped (SIGSTOP, a debugger) it cannot say itself; the kernel does (`is_stopped`).

Made by the supervisor for each of its processes; the descriptor travels with the "start" frame. A thread of this process
has one as well (`Heartbeat.of_thread`), in memory that no other process sees.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

NUM_BYTES = mmap.PAGESIZE
BEATS, STEPS, STEP, BUDGET = range(4)
WORD = 8 * 8
"""Bytes from one word to the next: only because one cache line each costs nothing here."""

WITHOUT_NUMBER = (1 << 63) - 1
"""In STEP: something other than a step keeps the loop from turning."""
STARTING = WITHOUT_NUMBER - 1
"""As STEP of a process that is not running yet, which writes no heartbeat: until then its start is what it is at."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One look at a process."""

    beats: int
    num_steps: int
    step: int
    budget_s: float
    is_stopped: bool = False
    """By a signal or by a debugger."""
    share: float = 1.0
    """How much of the time since the last look counts as time of the step."""


class Heartbeat:
    """One mapping of the page; each end has its own."""

    __slots__ = ("_memory", "_view", "_words")

    def __init__(self, fd: int) -> None:
        """The descriptor stays the caller's."""
        self._memory = mmap.mmap(fd, NUM_BYTES)
        self._view = memoryview(self._memory)
        self._words = self._view.cast("Q")[:: WORD // 8]

    @classmethod
    def create(cls) -> tuple[Heartbeat, int]:
        """A new page and its descriptor, which the caller owns. Raises OSError."""
        fd = os.memfd_create("actorllm-heartbeat", os.MFD_CLOEXEC)
        try:
            os.write(fd, bytes(NUM_BYTES))  # of memory, not of /dev/shm; written, it cannot be missing later
            return cls(fd), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of_thread(cls) -> Heartbeat:
        """One for both ends. Not to be closed: a thread that is stuck writes to it when it comes back."""
        return cls(-1)

    # The process itself

    def beat(self) -> None:
        """The loop has turned."""
        self._words[BEATS] += 1

    def begin(self, step: int, budget_s: float) -> None:
        """From now on the loop does not turn, for this long at most."""
        words = self._words
        words[BUDGET] = int(budget_s * 1e6)
        words[STEP] = step
        words[STEPS] += 1

    def end(self) -> None:
        words = self._words
        words[STEP] = 0
        words[BEATS] += 1

    # The watchdog's side

    def read(self, *, is_stopped: bool = False) -> Sign:
        words = self._words
        return Sign(words[BEATS], words[STEPS], words[STEP], words[BUDGET] / 1e6, is_stopped)

    def close(self) -> None:
        self._words.release()
        self._view.release()
        self._memory.close()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger. pid: of a child that was not reaped yet.

    False also when that cannot be found out, be it that this process is out of descriptors.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
