"""`WindowGroup`: the KV group of layers with a sliding window, whose blocks are given up where no layer will look again.

The group of the other layers has a block for all tokens of a slot; its tables are `KVCacheManager.tables`. A block of this group is
the *partner* of one of those: it holds the same tokens, in the layers with a window. So a block table of this group is that of the
other one, by way of `partner`, and workers are told of pairs. What is found of a prefix is found by the hashes of the other group.
Here it is cut to the longest part whose last window has its partners still.

A slot has partners from `low` to `high`, in blocks: those that the next tokens look at, and those that they are written to. A step
covers its tokens, and gives up what lies before their window. What a step in flight looks at may be handed out by the next one,
because steps run in launch order.

The group has an allocator of its own. Partners that are given up keep what they hold until others are out, as in `BlockPool`. It is
never empty: `types.kv_groups.num_window_blocks` counts what all slots may have together.

Invariants (`check_integrity`): a partner is referenced once by each slot that has it; every referenced block is the partner of one
block. Owned by `KVCacheManager`, and None there for models with one group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorllm.kvcache.block_pool import BlockPool
from actorllm.messages import I32, NO_I32

KEPT = 1
"""The label of blocks that keep what they hold."""


class WindowGroup:
    """See the module docstring."""

    def __init__(
        self, window: int, num_blocks: int, num_window_blocks: int, block_size: int, tables: I32, *, keeps: bool
    ) -> None:
        """tables: of the other group, [num_slots, max_blocks]. keeps: blocks keep what they hold, for a prefix cache."""
        self.window, self.block_size = window, block_size
        self.pool = BlockPool(num_window_blocks, self._on_evict)
        self.partner: I32 = np.full(num_blocks, -1, np.int32)
        """By block of the other group; -1: it has none."""
        self._owner: I32 = np.full(num_window_blocks, -1, np.int32)
        self.low: NDArray[np.int64] = np.zeros(len(tables), np.int64)
        self.high: NDArray[np.int64] = np.zeros(len(tables), np.int64)
        self.num_lost = 0
        """Partners that were handed out again: what was found of a prefix before may be less now."""
        self._tables, self._keeps = tables, keeps
        self._pairs: list[I32] = []
        self._behind: list[tuple[int, int]] = []
        """Slots with the token that they go on from, whose last chunk was longer than what they look back at."""

    def first_seen(self, token: int) -> int:
        """The first block that a token, and those behind it, look at."""
        return max(0, token - self.window + 1) // self.block_size

    def usable(self, found: I32) -> I32:
        """Those of the first blocks of a prefix that can be taken over: the last window of them has its partners."""
        count = found.size
        dead = np.flatnonzero(self.partner[found] < 0)
        while count and dead.size:
            last = int(dead[-1])
            if last < self.first_seen(count * self.block_size):
                break
            count, dead = last, dead[:-1]
        return found[:count]

    def take_over(self, slot: int, found: I32) -> None:
        """An empty slot begins with these blocks of a prefix (`usable`)."""
        low = self.first_seen(found.size * self.block_size)
        if low < found.size:
            self.pool.share(self.partner[found[low:]])
        self.low[slot], self.high[slot] = low, found.size

    def fork(self, source: int, slot: int, num_tokens: int, num_blocks: int) -> None:
        """A slot begins with the full blocks of so many tokens of another one, and has num_blocks in its table."""
        num_full = num_tokens // self.block_size
        low = min(int(self.low[source]), num_full)
        shared = self._tables[slot, low:num_full]
        if shared.size:
            self.pool.share(self.partner[shared])
        self.low[slot], self.high[slot] = low, num_full
        self._reach(slot, num_blocks)
        self._behind.append((slot, num_tokens))

    def begin(self) -> None:
        """A step is planned. What only the chunks of the last one looked at is given up."""
        for slot, token in self._behind:
            if self.high[slot]:  # it was not emptied since
                self._leave(slot, self.first_seen(token))
        self._behind.clear()

    def cover(self, slot: int, start: int, end: int, num_blocks: int) -> None:
        """A step computes the tokens [start, end) of a slot, which are in its first num_blocks blocks. These get partners."""
        self._leave(slot, self.first_seen(start))
        self._reach(slot, num_blocks)
        if end - start > 1:
            self._behind.append((slot, end))

    def empty(self, slot: int) -> None:
        """The slot is given up; its table is as it was."""
        low, high = int(self.low[slot]), int(self.high[slot])
        if low < high:
            self._release(self.partner[self._tables[slot, low:high]])
        self.low[slot] = self.high[slot] = 0

    def take_pairs(self) -> I32:
        """Blocks of the other group, each with its partner behind it: those that were made since the last call."""
        if not self._pairs:
            return NO_I32
        pairs = np.concatenate(self._pairs)
        self._pairs.clear()
        return pairs

    def _leave(self, slot: int, low: int) -> None:
        """No token of the slot looks at blocks before this one any more."""
        first, last = int(self.low[slot]), min(low, int(self.high[slot]))
        if first < last:
            self._release(self.partner[self._tables[slot, first:last]])
            self.low[slot] = last

    def _reach(self, slot: int, num_blocks: int) -> None:
        """Let the slot have partners up to this block."""
        high = int(self.high[slot])
        if num_blocks <= high:
            return
        blocks = self._tables[slot, high:num_blocks]
        partners = self.pool.allocate(blocks.size)
        self.partner[blocks], self._owner[partners] = partners, blocks
        self._pairs.append(np.stack((blocks, partners), 1).reshape(-1))
        self.high[slot] = num_blocks

    def _release(self, partners: I32) -> None:
        if self._keeps:
            self.pool.keep(partners, KEPT)
        self.pool.release(partners)

    def _on_evict(self, blocks: NDArray[np.intp], labels: I32) -> None:
        owners = self._owner[blocks]
        is_partner = self.partner[owners] == blocks
        self.partner[owners[is_partner]] = -1
        self.num_lost += int(np.count_nonzero(is_partner))

    def check_integrity(self, num_blocks: I32) -> None:
        """AssertionError when an invariant of the module docstring does not hold. num_blocks: by slot, of the other group."""
        self.pool.check_integrity()
        held = []
        for slot, count in enumerate(num_blocks.tolist()):
            low, high = int(self.low[slot]), int(self.high[slot])
            assert low <= high <= count, "a slot has partners beyond its blocks"
            held.append(self._tables[slot, low:high])
        blocks = np.concatenate(held)
        partners = self.partner[blocks]
        assert (partners >= 0).all(), "a block that is looked at has no partner"
        assert (self._owner[partners] == blocks).all(), "a partner belongs to another block"
        references = np.bincount(partners, minlength=self.pool.num_blocks)
        assert (references == self.pool._references).all(), "reference counts differ from the windows of slots"
