"""A thread that asks for short turns gets them alone: what it starts has the usual ones."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from actorllm.fleet.nodes.time_slice import SLICE_S, ask_for_short_slices

CALL = {"x86_64": 315, "aarch64": 275, "riscv64": 275}.get(platform.machine())


def slice_s() -> float:
    """Of the calling thread; 0 where the kernel tells none."""
    found = ctypes.create_string_buffer(56)
    assert CALL is not None
    assert ctypes.CDLL(None).syscall(CALL, 0, found, 56, 0) == 0
    return int(struct.unpack_from("<Q", found, 24)[0]) / 1e9


@pytest.mark.skipif(CALL is None, reason="the numbers of the system calls are not known here")
def test_the_turns_of_one_thread_become_short_and_its_children_have_the_usual_ones() -> None:
    program = f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import slice_s; print(slice_s())"

    def ask() -> tuple[float, bool, float, float]:
        usual_s, is_taken = slice_s(), ask_for_short_slices()
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return usual_s, is_taken, slice_s(), float(child.stdout)

    with ThreadPoolExecutor(1) as thread:
        usual_s, is_taken, now_s, of_child_s = thread.submit(ask).result()
    if usual_s == 0.0:
        pytest.skip("the kernel has no slices of its own for a thread (before 6.12)")
    assert is_taken == (os.getpriority(os.PRIO_PROCESS, 0) >= 0)
    if is_taken:
        assert now_s == SLICE_S < usual_s
    assert of_child_s == slice_s() == usual_s


def test_other_machines_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "sparc")
    assert not ask_for_short_slices()
