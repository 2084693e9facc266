"""`PeerMemory`: the KV memory of other replicas of this machine, of which blocks are copied that they have leased.

The memory of a lender is a file without a name that its owner has. This process maps it to read, once, and once more where it has
grown. Blocks side by side in both caches are copied by one call for all layers. Of many bytes two threads copy half each, since
one does not use all that memory can do. Nothing is encoded, and the lender does nothing for it. What is copied counts only if the
lease is there after the copy as well (`lease_board`).
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.tiers.lease_board import LeaseBoard, Lent

logger = logging.getLogger(__name__)

BYTES_FOR_TWO = 4 << 20
"""From so many bytes on, a copy is worth a second thread: it takes some hundred microseconds."""
NUM_SPECIAL_BLOCKS = 2
"""Behind all others of a cache: zeros, and padding."""

Regions = Sequence[NDArray[np.uint8]]
"""[num_layers, blocks, bytes of a block in a layer] each."""


class PeerMemory:
    """See the module docstring. `pull` is called on threads, one at a time."""

    def __init__(self, paths: Sequence[str], board: LeaseBoard, regions_of_own: Callable[[], Regions]) -> None:
        """paths: of the memory of each replica, by number; empty: that one lends nothing."""
        self._paths = paths
        self._board = board
        self._own = regions_of_own
        self._maps: dict[int, mmap.mmap] = {}

    def pull(self, lease: Sequence[int], digest: bytes, first: int, blocks: Sequence[int]) -> tuple[int, float]:
        """Fill blocks with those of a lease, from its first-th on; how many have what they should have, all or none; and seconds.

        digest: the hash that the last block of the lease must have.
        """
        began = time.perf_counter()
        replica, slot, number = lease
        lent = self._board.read(replica, slot, number, digest)
        if lent is None or lent.blocks.size < first + len(blocks):
            return 0, time.perf_counter() - began
        targets = np.array(blocks, np.int32)
        try:
            self._fill(lent, targets, lent.blocks[first : first + len(blocks)])
            is_good = self._board.is_valid(lent)
        except (OSError, ValueError):  # its owner has ended, or it is smaller than its lease says
            is_good = False
        except Exception:  # half of it may be there: blocks that nothing has cleared would be given to other requests
            logger.exception("a copy of KV blocks of replica %d failed", replica)
            is_good = False
        if not is_good:  # what was copied may be no finite numbers
            for own in self._own():
                own[:, targets] = 0
        return len(blocks) if is_good else 0, time.perf_counter() - began

    def publish(self, path: str) -> None:
        """The own cache has its memory from here on. Where that is mapped, there is nothing to do. path: its own of `paths`."""

    def _fill(self, lent: Lent, targets: NDArray[np.int32], sources: NDArray[np.int32]) -> None:
        """Copy blocks of a lease. Raises OSError, ValueError: they cannot be had."""
        for own, other in zip(self._own(), self._regions_of(lent), strict=True):
            copy_blocks(own, targets, other, sources)

    def _regions_of(self, lent: Lent) -> list[NDArray[np.uint8]]:
        """Those of the lender, whose cache may have another number of blocks than this one."""
        shapes = [(own.shape[0], lent.cache_blocks + NUM_SPECIAL_BLOCKS, own.shape[2]) for own in self._own()]
        starts, end = [], 0
        for shape in shapes:
            starts.append(end)
            end += -(-int(np.prod(shape)) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        memory = self._mapped(lent.replica, starts[-1] + int(np.prod(shapes[-1])))
        return [
            np.frombuffer(memory, np.uint8, int(np.prod(shape)), start).reshape(shape)
            for shape, start in zip(shapes, starts, strict=True)
        ]

    def _mapped(self, replica: int, num_bytes: int) -> mmap.mmap:
        known = self._maps.get(replica)
        if known is None or len(known) < num_bytes:
            path = self._paths[replica] if replica < len(self._paths) else ""
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                known = self._maps[replica] = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            if len(known) < num_bytes:
                raise ValueError(f"the memory of replica {replica} has {len(known)} bytes, and {num_bytes} are leased")
        return known


def copy_blocks(
    own: NDArray[np.uint8], targets: NDArray[np.int32], other: NDArray[np.uint8], sources: NDArray[np.int32]
) -> None:
    """Blocks that stand side by side in both are copied together; of many bytes another thread copies half of the layers."""
    is_break = (np.diff(targets) != 1) | (np.diff(sources) != 1)
    starts = [0, *(np.flatnonzero(is_break) + 1).tolist(), targets.size]
    runs = [(int(targets[a]), int(sources[a]), b - a) for a, b in pairwise(starts)]

    def copy(layers: slice) -> None:
        for to, source, number in runs:
            np.copyto(own[layers, to : to + number], other[layers, source : source + number])

    if targets.size * own.shape[0] * own.shape[2] < BYTES_FOR_TWO or own.shape[0] < 2:
        copy(slice(None))
        return
    middle = own.shape[0] // 2
    failed: list[BaseException] = []

    def copy_rest() -> None:
        try:
            copy(slice(middle, None))
        except BaseException as error:  # it is raised where the copy was asked for
            failed.append(error)

    beside = threading.Thread(target=copy_rest, name="kv-copy")
    beside.start()
    try:
        copy(slice(0, middle))
    finally:
        beside.join()  # until then it writes
    if failed:
        raise failed[0]
