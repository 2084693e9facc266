"""What is left of a process."""

from __future__ import annotations

from pathlib import Path


def is_gone(pid: int) -> bool:
    """Nothing runs under this pid any more; a zombie that only waits for its parent does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True
