"""Short turns on a processor, for a thread that does little at a time and is waited for.

Linux lets a thread that wakes wait until the running one has used a slice of the processor (EEVDF), unless its own is shorter. The
main thread of an agent copies a batch of outputs in less than the shortest slice. What wakes it, the scheduler, goes on planning
for longer. With fewer processors than busy threads, outputs would wait for that on every node.

The share of processor time stays the same. Processes and threads that are started from here have the usual slice. The kernel takes
a wish from version 6.12 on. Others ignore it or refuse, and nothing else depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys

SLICE_S = 1e-4
"""The shortest that the kernel takes."""
_ATTRIBUTES = struct.Struct("<IIQiIQQQII")
"""`struct sched_attr`: size, policy, flags, niceness, priority, runtime, and four that are of other policies."""
_RESET_ON_FORK = 1
_CALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""Numbers of `sched_setattr`, which the C library has no function for."""


def ask_for_short_slices() -> bool:
    """For the calling thread. False: the kernel refuses, it has no such call, or the thread is scheduled in another way."""
    number = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness < 0:  # what is started would lose it with the slice
        return False
    size = _ATTRIBUTES.size
    told = _ATTRIBUTES.pack(size, os.SCHED_OTHER, _RESET_ON_FORK, niceness, 0, int(SLICE_S * 1e9), 0, 0, 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(told, size), 0) == 0)
    return False
