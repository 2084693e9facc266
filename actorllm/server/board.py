"""`Board`: the numbers that the API processes of one server show each other, a row per process in shared memory.

Each process writes its own row only, and reads all of them; a number is one aligned word. So any of them can tell what all
have under way, and a scrape of any of them is whole. What a process has counted stays there when it dies and goes on with
the next one in its place. What it had under way is cleared by the owner of the processes (`clear`). A server of one process has
a board of one row in its own memory.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Of the histogram of how late a loop comes to what is due, in seconds; there is one bucket more, without a bound."""

IN_FLIGHT, LAG_SUM, LAG_COUNTS = 0, 1, 2
NUM_COLUMNS = LAG_COUNTS + len(LAG_BOUNDS) + 1


class Board:
    def __init__(self, num_rows: int, fd: int = -1) -> None:
        """fd: of the memory that another process has made (`share`); it can be closed afterwards."""
        size = num_rows * NUM_COLUMNS * 8
        self._memory = mmap.mmap(fd, size)
        self._table: NDArray[np.float64] = np.frombuffer(self._memory, np.float64).reshape(num_rows, NUM_COLUMNS)

    @staticmethod
    def share(num_rows: int) -> int:
        """A descriptor of memory for so many rows, to be handed to the processes."""
        fd = os.memfd_create("actorllm-board")
        os.ftruncate(fd, num_rows * NUM_COLUMNS * 8)
        return fd

    @property
    def num_rows(self) -> int:
        return len(self._table)

    @property
    def num_in_flight(self) -> int:
        """Requests under way, of all processes together."""
        return int(self._table[:, IN_FLIGHT].sum())

    def set_in_flight(self, row: int, number: int) -> None:
        self._table[row, IN_FLIGHT] = number

    def note_lag(self, row: int, seconds: float) -> None:
        self._table[row, LAG_COUNTS + int(np.searchsorted(LAG_BOUNDS, seconds))] += 1
        self._table[row, LAG_SUM] += seconds

    def clear(self, row: int) -> None:
        """Its process is gone, and with it what was under way there."""
        self._table[row, IN_FLIGHT] = 0

    def lag(self) -> dict[str, Any]:
        """The histogram over all processes: counts of the buckets of LAG_BOUNDS and of the one beyond, and the sum."""
        total = self._table.sum(axis=0)
        return {"counts": total[LAG_COUNTS:].astype(int).tolist(), "sum": float(total[LAG_SUM])}
