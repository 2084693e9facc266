"""`bench/calls.py`: what it counts, and that a decode step calls no more than its page says."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import calls  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

WAKE_UPS = 1.1
"""How much more it may be, where threads sleep and are woken more often."""


@pytest.mark.slow(reason="on a busy machine threads are woken more often: the count is of a quiet one")
def test_a_decode_step_calls_few_python_functions() -> None:
    calls.counts.clear()
    threading.setprofile(calls.count)
    sys.setprofile(calls.count)
    try:
        asyncio.run(calls.decode())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    by_thread: Counter[str] = Counter()
    for (thread, _, _), number in calls.counts.items():
        by_thread[thread] += number
    assert {"actorllm:worker0", "actorllm:engine", "MainThread"} <= set(by_thread)
    assert calls.NUM_STEPS * calls.TARGET / 2 < by_thread.total() <= calls.NUM_STEPS * calls.TARGET * WAKE_UPS
