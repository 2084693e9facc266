"""One time base for all processes of an engine: CLOCK_MONOTONIC seconds, shown to users as epoch seconds.

The monotonic clock is the same for every process of a machine and never steps. The scheduler, the worker and
the frontend stamp their messages with it. The pure core never calls it: there `now` is an argument.
"""

from __future__ import annotations

import time

now = time.monotonic

_EPOCH_OFFSET_S = time.time() - time.monotonic()


def to_epoch(monotonic_s: float) -> float:
    """Seconds since 1970 for a monotonic stamp; the offset is fixed once, so that differences stay exact."""
    return monotonic_s + _EPOCH_OFFSET_S


def from_epoch(epoch_s: float) -> float:
    """The monotonic stamp of seconds since 1970; the inverse of `to_epoch`."""
    return epoch_s - _EPOCH_OFFSET_S
