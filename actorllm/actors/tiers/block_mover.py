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
from actorllm.actors.tiers.together import together

MAX_THREADS = 4
"""That load: a disk answers several at a time, and what one has read is checked while another one reads."""
BYTES_OF_A_THREAD = 4 << 20
"""A thread that reads less than that costs more than it saves."""

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
        number = 0
        with self._lock:
            self.num_jobs += 1
            began = time.perf_counter()
            for key, block in zip(keys, blocks, strict=True):
                if not self._goes_on(era):
                    break
                number += self._write(key, self._views_of(block))
            return number, time.perf_counter() - began

    def load(self, era: int, keys: NDArray[np.uint64], blocks: Sequence[int]) -> tuple[int, float]:
        """How many of these blocks were filled, from the first on without a gap; and seconds.

        A block that could not be read is zeros. One behind it is as it was, or filled.
        """
        with self._lock:
            self.num_jobs += 1
            began = time.perf_counter()
            is_good = [False] * len(blocks)
            positions, has_gap = iter(range(len(blocks))), threading.Event()

            def fill() -> None:
                for at in positions:
                    if has_gap.is_set():  # nothing behind it counts
                        return
                    is_good[at] = self._goes_on(era) and self._read(keys[at], self._views_of(blocks[at]))
                    if not is_good[at]:
                        has_gap.set()

            # A job that was dropped looks at no block: the memory of the cache may be given back by then.
            size = sum(view.nbytes for view in self._views_of(blocks[0])) if blocks and self._goes_on(era) else 0
            together(fill, max(1, min(MAX_THREADS, len(blocks), size * len(blocks) // BYTES_OF_A_THREAD)))
            number = is_good.index(False) if False in is_good else len(blocks)
            return number, time.perf_counter() - began

    def pull(self, era: int, copy: Callable[[], tuple[int, float]]) -> tuple[int, float]:
        """As `load`, by a function that fills blocks with what another replica has."""
        with self._lock:
            self.num_jobs += 1
            return copy() if era == self._era and not self._is_closed else (0, 0.0)

    def _goes_on(self, era: int) -> bool:
        return not self._is_closed and era == self._era

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
