"""`LoadBoard`: what schedulers tell routers, a row per replica in shared memory, and `LoadPublisher`, which writes one.

Each scheduler writes its own row only, after each result; readers take it as it is. A word is one aligned number. A row that is
half of the turn before is a hint as good as any: a wrong one costs time, and no token. So there is no lock and no message. The
owner of the engine makes the memory, and schedulers open it by its number in that process.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import StepFailed, StepResult
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_time import StepTime, features_of

NUM_FREE_BLOCKS, NUM_STEPS, WEIGHTS = 0, 1, 2
NUM_COLUMNS = WEIGHTS + 4
NUM_ROWS = 64
"""As many as there may be replicas."""


class LoadBoard:
    """See the module docstring."""

    def __init__(self, path: str | None = None) -> None:
        """path: of memory that another process has made; None: it is made here. Raises OSError."""
        self._fd = -1
        size = NUM_ROWS * NUM_COLUMNS * 8
        self._fd = os.memfd_create("actorllm-loads", os.MFD_CLOEXEC) if path is None else os.open(path, os.O_RDWR)
        try:
            if path is None:
                os.ftruncate(self._fd, size)
            memory = mmap.mmap(self._fd, size)
        except BaseException:
            self.close()
            raise
        self._table: NDArray[np.float64] = np.frombuffer(memory, np.float64).reshape(NUM_ROWS, NUM_COLUMNS)

    @property
    def path(self) -> str:
        """Under which other processes of this user open it, as long as it is not closed."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """No other process can open it any more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def clear(self, row: int) -> None:
        """Its replica has ended: nothing is known of the next one."""
        self._table[row] = 0.0

    def write(self, row: int, num_free_blocks: int, times: StepTime) -> None:
        """What the scheduler of a replica knows now."""
        cells = self._table[row]
        cells[NUM_FREE_BLOCKS] = num_free_blocks
        cells[WEIGHTS:] = times.weights
        cells[NUM_STEPS] = times.num_steps

    def read(self, row: int) -> tuple[int, tuple[float, float, float, float]] | None:
        """Free blocks, and what a step costs: fixed, for a prompt token, a decode row, a token of context, in seconds.

        None: not enough steps have been seen.
        """
        free, num_steps, *weights = self._table[row].tolist()
        if num_steps < StepTime.MIN_STEPS or not all(-1e6 < weight < 1e6 for weight in weights):
            return None
        fixed, prompt, decode, context = weights
        return int(free), (fixed, prompt, decode, context)


class LoadPublisher:
    """Learns what steps take, and writes the row of its replica. A part of the scheduler actor."""

    def __init__(self, path: str, row: int) -> None:
        """Raises OSError: the owner has ended."""
        board = LoadBoard(path)
        board.close()  # the memory stays mapped
        self._board = board
        self._row = row
        self._times = StepTime()
        self._launched: dict[int, tuple[int, int, int]] = {}

    def launched(self, record: StepRecord, scheduler: Scheduler) -> None:
        """A step is on its way, the newest of the ledger."""
        self._launched[record.step] = features_of(record, scheduler)[:3]

    def done(self, result: StepResult | StepFailed, scheduler: Scheduler) -> None:
        """Its result has come."""
        features = self._launched.pop(result.step, None)
        if features is not None and isinstance(result, StepResult):
            p, d, context = features
            self._times.observe(p, d + result.num_checked, context, result.ended - result.started)
        self._board.write(self._row, scheduler.kv.num_free, self._times)

    def clear(self) -> None:
        """The workers are lost, with every step in flight."""
        self._launched.clear()
