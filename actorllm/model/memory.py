"""How much memory this process may use, and how much it has used (Linux's own figures, in bytes), and when there is none."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

DEFAULT_CACHE_SHARE = 0.4
"""Of the available memory, for the KV cache on a CPU, when neither its size nor a share is configured."""

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """What new allocations may take without swapping: the machine's figure, or less where a control group limits it."""
    machine = _field(_PROC / "meminfo", "MemAvailable:")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return machine
    cached = _field(_CGROUP / "memory.stat", "inactive_file", scale=1) if (_CGROUP / "memory.stat").is_file() else 0
    return max(0, min(machine, limit - used + cached))


def limit_bytes() -> int:
    """All that the machine has, or less where a control group limits it."""
    machine, limit = _field(_PROC / "meminfo", "MemTotal:"), _number(_CGROUP / "memory.max")
    return machine if limit is None else min(machine, limit)


def reset_peak() -> None:
    """Let `peak_bytes` start again from what is in use now."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return  # not permitted in some containers: the peak then is that of the whole life, an overestimate


def peak_bytes() -> int:
    """The most memory this process has held since `reset_peak`."""
    return _field(_PROC / "self/status", "VmHWM:")


def resident_bytes(pid: int | None = None) -> int:
    """The memory that a process holds, by default this one. Raises OSError when it has ended."""
    return _field(_PROC / ("self" if pid is None else str(pid)) / "status", "VmRSS:")


def trim() -> None:
    """Give back to the system what was freed in the middle of the heap. Without effect where the C library cannot."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def drop_pages(files: Iterable[Path]) -> None:
    """Ask the system to give up what it has in memory of these files. What other processes have mapped stays."""
    for file in files:
        with contextlib.suppress(OSError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that there was not enough memory."""
    import torch  # here: the owner of the workers' processes asks for memory, too, and has no need of it

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _SHORTAGE)


_SHORTAGE = ("not enough memory", "can't allocate memory", "out of memory", "Cannot allocate memory")
"""What torch's allocators, oneDNN and the C library say."""


def _field(path: Path, name: str, scale: int = 1024) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * scale
    raise OSError(f"{path} has no field {name}")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None
