"""`InterpreterShare`: how much of the time a thread of this process could run, while others of it hold the interpreter.

A thread that computes with torch gives the interpreter back at every operation. If the application never sleeps, it then waits for
it some milliseconds each time, and a step takes a hundred times as long as it computes. Such a step is slow, not stuck.

Each look first gives the interpreter away and counts how long it is in coming back. If that takes part of a switch interval, others
want it, and only the processor's time of the thread counts. A thread that sleeps for good has used none: it waits for something
else, and all of the time counts.
"""

from __future__ import annotations

import sys
import time

LEAST_SHARE = 0.05
"""Counted in any case: a step that polls for something without end is found, if twenty times as late."""
ASLEEP_S = 20e-6
"""Of a second. A thread that waits for the interpreter wakes at every switch interval (5 ms), and uses more."""
GIVEN_AWAY_S = 100e-6
"""Long enough for another thread to wake and take the interpreter, if it waits for it."""


class InterpreterShare:
    """Of one thread, between one look and the next. Made and looked at by another thread."""

    def __init__(self, ident: int) -> None:
        """ident: of the thread, as Python counts them; it must live as long as it is looked at."""
        self._clock = time.pthread_getcpuclockid(ident) if hasattr(time, "pthread_getcpuclockid") else None
        self._last = (time.monotonic(), self._used())

    def look(self) -> float:
        """Of the time since the last look, between LEAST_SHARE and 1."""
        (before, used_before), self._last = self._last, (time.monotonic(), self._used())
        passed, used = self._last[0] - before, self._last[1] - used_before
        if self._clock is None or passed <= 0.0 or used < ASLEEP_S * passed or not is_contended():
            return 1.0
        return max(LEAST_SHARE, min(1.0, used / passed))

    def _used(self) -> float:
        """Seconds of a processor; 0.0 where they are not counted by thread."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)


def is_contended() -> bool:
    """Whether another thread of this process keeps the interpreter for as long as it may."""
    began = time.perf_counter()
    time.sleep(GIVEN_AWAY_S)
    return time.perf_counter() - began > GIVEN_AWAY_S + sys.getswitchinterval() / 2
