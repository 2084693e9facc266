"""`LoadBoard`: what schedulers tell routers, a row per replica in shared memory, and `LoadPublisher`, which writes one.

Each scheduler writes its own row only, after each result; readers take it as it is. A word is one aligned number. A row that is
half of the turn before is a hint as good as any: a wrong one costs time, and no token. So there is no lock and no message. The
owner of the engine makes the memory (`memory_file`), and schedulers open it.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import StepFailed, StepResult
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.router import MAX_REPLICAS
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_time import StepTime, features_of

NUM_FREE_BLOCKS, NUM_STEPS, WEIGHTS = 0, 1, 2
NUM_COLUMNS = WEIGHTS + 4


class LoadBoard:
    """See the module docstring."""

    NUM_BYTES = MAX_REPLICAS * NUM_COLUMNS * 8

    def __init__(self, path: str) -> None:
        """path: of NUM_BYTES of memory, which stays mapped when the file is closed. Raises OSError: its owner has ended."""
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), self.NUM_BYTES)
        self._table: NDArray[np.float64] = np.frombuffer(memory, np.float64).reshape(MAX_REPLICAS, NUM_COLUMNS)

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
        self._board = LoadBoard(path)
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
            self._times.observe(*features, result.ended - result.started)
        self._board.write(self._row, scheduler.kv.num_free, self._times)

    def clear(self) -> None:
        """The workers are lost, with every step in flight."""
        self._launched.clear()
