"""`LeaseBoard`: which KV blocks replicas of a machine lend each other, in memory that all of them map.

Each replica has a row: the *era* of the KV memory of each rank, and SLOTS leases. A lease has a number, drawn anew each time. It
has the hash of its last block, the size of the lender's cache, and the numbers of the blocks. The lender's scheduler writes it, its
number last.
It clears the number before it frees the blocks. A reader looks at the number and the era before it copies the blocks and once
more after that (`read`, `is_valid`). If both are as before, the blocks were not reused meanwhile.

The worker whose memory it is writes the era before it touches the memory. So after a death of the worker no lease of before is
valid, whatever its scheduler has heard of that. The reader writes two words of a lease: that it has what it wants (`take`), and
that its request still queues (`renew`). What a wrong word costs is a prompt that is computed twice, or blocks that are lent for
one more term.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

import numpy as np
from numpy.typing import NDArray

from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.messages import I32, I64
from actorllm.scheduling.router import MAX_REPLICAS

SLOTS = 128
"""Leases of a replica at a time."""
NUMBER, TAKEN, RENEWED, ERA, CACHE_BLOCKS, COUNT, DIGEST = range(7)
"""Words of a lease; the blocks are behind the digest, two to a word."""
HEADER_WORDS = DIGEST + HASH_BYTES // 8
MAX_RANKS = 64
"""Of a replica."""
ERA_BYTES = 8 * MAX_REPLICAS * MAX_RANKS


def _words(max_blocks: int) -> int:
    return HEADER_WORDS + -(-max_blocks // 2)


def num_bytes(max_blocks: int) -> int:
    """Of a board whose leases have up to so many blocks. Only pages that were written take memory."""
    return ERA_BYTES + 8 * MAX_REPLICAS * SLOTS * _words(max_blocks)


def era_of(eras: Sequence[int]) -> int:
    """Of a replica, by those of its ranks: another one as soon as one of them begins another."""
    return reduce(xor, eras, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """A lease, as its reader found it."""

    replica: int
    slot: int
    number: int
    era: int
    cache_blocks: int
    """How many blocks the lender's cache has."""
    blocks: I32


class LeaseBoard:
    """See the module docstring."""

    def __init__(self, path: str, max_blocks: int) -> None:
        """path: of `num_bytes(max_blocks)` bytes of memory. Raises OSError: its owner has ended."""
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), num_bytes(max_blocks))
        words: NDArray[np.int64] = np.frombuffer(memory, np.int64)
        self._eras = words[: ERA_BYTES // 8].reshape(MAX_REPLICAS, MAX_RANKS)
        self._leases = words[ERA_BYTES // 8 :].reshape(MAX_REPLICAS, SLOTS, _words(max_blocks))
        self._max_blocks = max_blocks

    # The worker that has the memory

    def begin_era(self, replica: int, rank: int = 0) -> int:
        """The memory of this rank changes its contents: nothing that was lent of its replica counts. Returns the new era.

        What a lease is of is the era of all ranks (`era_of`).
        """
        self._eras[replica, rank] = era = secrets.randbits(62) + 1
        return era

    # The reader

    def read(self, replica: int, slot: int, number: int, digest: bytes) -> Lent | None:
        """What a lease lends; None: it is over, or is of other tokens."""
        if not (0 <= replica < MAX_REPLICAS and 0 <= slot < SLOTS and number > 0):
            return None
        entry = self._leases[replica, slot]
        count, cache_blocks = int(entry[COUNT]), int(entry[CACHE_BLOCKS])
        blocks = entry[HEADER_WORDS:].view(np.int32)[: max(0, count)].copy()
        is_right = entry[DIGEST:HEADER_WORDS].tobytes() == digest
        lent = Lent(replica, slot, number, int(entry[ERA]), cache_blocks, blocks)
        if not is_right or not 0 < count <= self._max_blocks or not self.is_valid(lent):
            return None
        return lent if ((blocks >= 0) & (blocks < cache_blocks)).all() else None

    def is_valid(self, lent: Lent) -> bool:
        """Whether its blocks have held what was lent up to now."""
        is_there = self._leases[lent.replica, lent.slot, NUMBER] == lent.number
        return bool(is_there and np.bitwise_xor.reduce(self._eras[lent.replica]) == lent.era)

    def take(self, replica: int, slot: int, number: int) -> None:
        """The reader needs a lease no more."""
        if 0 <= replica < MAX_REPLICAS and 0 <= slot < SLOTS:
            self._leases[replica, slot, TAKEN] = number

    def renew(self, replica: int, slot: int, number: int) -> None:
        """The reader still wants a lease."""
        if 0 <= replica < MAX_REPLICAS and 0 <= slot < SLOTS:
            self._leases[replica, slot, RENEWED] = number

    # The lender

    def lender(self, replica: int, cache_blocks: int) -> Lender:
        """The leases of a replica whose cache has so many blocks."""
        return Lender(self._leases[replica], replica, cache_blocks, self._max_blocks)


class Lender:
    """The side of a lender's scheduler (`scheduling.tiers.leases.LeaseTable`)."""

    def __init__(self, leases: NDArray[np.int64], replica: int, cache_blocks: int, max_blocks: int) -> None:
        self._leases = leases
        self._replica, self._cache_blocks, self._max_blocks = replica, cache_blocks, max_blocks
        self._free = list(range(SLOTS - 1, -1, -1))

    def clear(self) -> None:
        """Those of a scheduler that is gone are over."""
        self._leases[:, NUMBER] = 0

    def grant(self, blocks: I32, digest: bytes, era: int) -> I64 | None:
        if not self._free or blocks.size > self._max_blocks:
            return None
        slot = self._free.pop()
        entry = self._leases[slot]
        entry[NUMBER] = 0
        entry[TAKEN:DIGEST] = 0, 0, era, self._cache_blocks, blocks.size
        entry[DIGEST:HEADER_WORDS] = np.frombuffer(digest, np.int64)
        entry[HEADER_WORDS:].view(np.int32)[: blocks.size] = blocks
        entry[NUMBER] = number = secrets.randbits(62) + 1
        return np.array([self._replica, slot, number, blocks.size], np.int64)

    def end(self, lease: I64) -> None:
        slot = int(lease[1])
        self._leases[slot, NUMBER] = 0
        self._free.append(slot)

    def is_taken(self, lease: I64) -> bool:
        slot, number = lease.tolist()[1:3]
        return bool(self._leases[slot, TAKEN] == number)

    def is_renewed(self, lease: I64) -> bool:
        slot, number = lease.tolist()[1:3]
        if self._leases[slot, RENEWED] != number:
            return False
        self._leases[slot, RENEWED] = 0
        return True
