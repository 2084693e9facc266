"""`BlockMover`: moves KV blocks of a worker to the tiers and back, on a thread beside its steps.

The scheduler holds the blocks meanwhile (`scheduling.tiers.transfers`), so no step reads or writes them. One job runs at a
time. A job is of the scheduler that asked for it. When another scheduler takes its place, or the memory is given back, jobs
that have not begun are dropped. `quiesce` waits for the one that runs: its blocks may have another use after that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.tiers.slot_file import SlotFile, Views

ViewsOf = Callable[[int], Views]


class BlockMover:
    """See the module docstring. `store` and `load` are called on threads, all else on the loop."""

    def __init__(self, files: Sequence[SlotFile], views_of: ViewsOf) -> None:
        """files: the first that has a block gives it; all of them get it. views_of: the memory of a block."""
        self._files = files
        self._views_of = views_of
        self._lock = threading.Lock()
        self._era = 0
        self._is_closed = False
        self.num_jobs = 0

    @property
    def era(self) -> int:
        """Of jobs that are asked for now."""
        return self._era

    def drop(self) -> None:
        """Jobs that were asked for and have not begun will not be begun."""
        self._era += 1

    def quiesce(self) -> None:
        """Jobs that were asked for are over, or will not be begun."""
        self.drop()
        with self._lock:
            pass

    def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        self.quiesce()
        for file in self._files:
            file.close()

    def store(self, era: int, keys: NDArray[np.uint64], blocks: Sequence[int]) -> tuple[int, float]:
        """How many of these blocks are in a tier now; and seconds."""
        return self._run(era, keys, blocks, self._write)

    def load(self, era: int, keys: NDArray[np.uint64], blocks: Sequence[int]) -> tuple[int, float]:
        """How many of these blocks were filled, from the first on without a gap; and seconds. The next one is zeros."""
        return self._run(era, keys, blocks, self._read, is_chain=True)

    def pull(self, era: int, copy: Callable[[], tuple[int, float]]) -> tuple[int, float]:
        """As `load`, by a function that fills blocks with what another replica has."""
        with self._lock:
            self.num_jobs += 1
            return copy() if era == self._era and not self._is_closed else (0, 0.0)

    def _run(
        self,
        era: int,
        keys: NDArray[np.uint64],
        blocks: Sequence[int],
        move: Callable[[NDArray[np.uint64], Views], bool],
        is_chain: bool = False,
    ) -> tuple[int, float]:
        number = 0
        with self._lock:
            self.num_jobs += 1
            began = time.perf_counter()
            for key, block in zip(keys, blocks, strict=True):
                if self._is_closed or era != self._era:
                    break
                if move(key, self._views_of(block)):
                    number += 1
                elif is_chain:
                    break
            return number, time.perf_counter() - began

    def _write(self, key: NDArray[np.uint64], views: Views) -> bool:
        is_there = [file.write(key, views) for file in self._files]  # every file gets it
        return any(is_there)

    def _read(self, key: NDArray[np.uint64], views: Views) -> bool:
        if any(file.read(key, views) for file in self._files):
            return True
        # What was read may be no finite numbers. The scheduler that would have it cleared may be gone by then.
        for view in views:
            np.frombuffer(view, np.uint8)[:] = 0
        return False
