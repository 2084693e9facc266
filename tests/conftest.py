"""Fixtures of the whole suite: nothing may be left behind by a test."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell starts its background jobs with Ctrl-C ignored, and what is ignored is inherited by every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # device="auto" is the CPU here, whatever machine this is
# Names of engines are one user's: two runs of this suite must not meet each other, nor anybody's real engines.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="actorllm-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


def _shared_memory_names() -> set[str]:
    """Segments that this process made and that have a name still (see ring.segment); other runs may be under way."""
    folder = Path("/dev/shm")
    mine = f"allm-{os.getpid():x}-"
    return {p.name for p in folder.iterdir() if p.name.startswith(mine)} if folder.is_dir() else set()


def _children() -> set[int]:
    """Processes whose parent is this one."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(int(pid) for pid in (task / "children").read_text().split())
        except FileNotFoundError:
            continue
    return pids


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No shared memory, child process or file descriptor of ours outlives the test that made it."""
    names, children, fds = _shared_memory_names(), _children(), len(os.listdir("/proc/self/fd"))
    yield
    assert _shared_memory_names() <= names, "left in /dev/shm"
    assert _children() <= children, "left a child process"
    assert len(os.listdir("/proc/self/fd")) <= fds + 4, "left file descriptors open"
