"""What a program cannot avoid that gets its texts from another process: the floor of embedding.py.

The other process is this file. For each token of some streams it multiplies matrices as long as a step of a small model takes, in
as many threads, and then writes one line with a text for each stream to a pipe. The application reads the pipe on its own loop. It
has no journal, no message format, no limit and no request that could be aborted: one thread, one wake-up, one read.

    python bench/pipe_floor.py THREADS
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from sides import PR_SET_PDEATHSIG

STEP_S = 0.003
"""About a step of the storyteller."""
WEIGHTS = 1024, 2048
"""In float32: 8 MiB, the bytes of its weights."""


def compute(threads: int) -> None:
    """Answer lines of JSON, [streams, tokens], with as many lines of texts as there are tokens."""
    import numpy as np

    weights = np.ones(WEIGHTS, np.float32)
    parts = np.array_split(weights, threads, axis=1)

    def multiply(part: Any, rows: Any, until: float) -> None:
        while time.perf_counter() < until:
            np.matmul(rows, part)

    for line in sys.stdin:
        streams, tokens = json.loads(line)
        rows = np.ones((streams, WEIGHTS[0]), np.float32)
        texts = json.dumps([" word"] * streams) + "\n"
        for _ in range(tokens):
            until = time.perf_counter() + STEP_S
            others = [threading.Thread(target=multiply, args=(part, rows, until)) for part in parts[1:]]
            for other in others:
                other.start()
            multiply(parts[0], rows, until)
            for other in others:
                other.join()
            sys.stdout.write(texts)
            sys.stdout.flush()


class PipeFloor:
    """The application's side. Streams that are asked for in one turn of the loop go together."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        """write: sends to the other process."""
        self._write = write
        self._asked: list[tuple[asyncio.Queue[str], int]] = []
        self._open: list[asyncio.Queue[str]] = []

    async def generate(self, request_id: str, tokens: int, seed: int) -> AsyncIterator[str]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._ask)
        self._asked.append((queue, tokens))
        for _ in range(tokens):
            yield await queue.get()

    def _ask(self) -> None:
        (tokens,) = {tokens for _, tokens in self._asked}
        self._open = [queue for queue, _ in self._asked]
        self._asked.clear()
        self._write(json.dumps([len(self._open), tokens]).encode() + b"\n")

    def on_line(self, line: bytes) -> None:
        """One text for each stream has come."""
        for queue, text in zip(self._open, json.loads(line), strict=True):
            queue.put_nowait(text)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it may be stopped when the benchmark is killed
    compute(int(sys.argv[1]))
