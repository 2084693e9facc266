"""`BlockPool`: the blocks of the KV cache, free or referenced, and which of the free ones keep what they hold.

A block is *kept* when it has a label: the prefix index put it in and can find it again. A kept block without a reference is
free like any other, but it is handed out last. First come the blocks without a label: the recently used before the never used,
whose memory was never touched. When those are out, the kept ones follow, least recently used first and some (a 500th of the
pool) at a time. The label is then gone, and the index is told.

Invariants (`check_integrity`): every block is free with a reference count of zero, or has a positive one; never both. A
free block is on the stack (no label) or in the queue (label); never both, never twice. Blocks come off in a fixed order, and
two requests for m and n blocks yield the same blocks as one for m + n. So a replayed or simulated run allocates exactly as the
live one did.

A freed block may be handed out again at once, although a step in flight still names it. Steps run in launch order, so the step
that writes into it for its next owner runs after every step of the last owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32, NO_I32

_ZERO: I32 = np.zeros((), np.int32)
_ONE: I32 = np.ones((), np.int32)


@dataclass(frozen=True, slots=True)
class BlockPoolStatistics:
    num_blocks: int
    num_free: int
    num_kept: int
    """Free blocks that keep what they hold, until others are out."""
    num_shared: int
    """Blocks with more than one reference."""
    num_evicted: int
    """Kept blocks that were handed out again, since the start."""
    peak_used: int


class BlockPool:
    """A stack and a queue of free block ids, and a reference count and a label per block.

    on_evict(blocks, labels): these kept blocks are handed out again.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[NDArray[np.intp], I32], None] | None = None) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks={num_blocks} must be positive")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._on_evict = on_evict
        self._stack: NDArray[np.intp] = np.arange(num_blocks - 1, -1, -1)  # block 0 is handed out first
        self._num_stacked = num_blocks
        # The queue: what was freed together, the first to be evicted first. Chunks are numbered. A block that is taken out of
        # the middle leaves a dead entry behind: those in chunks up to the one after which it was taken.
        self._queue: deque[NDArray[np.intp]] = deque()
        self._last_chunk = 0
        self._taken_after: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._num_dead = 0
        self._batch = max(1, num_blocks // 512)
        self._labels: I32 = np.zeros(num_blocks, np.int32)
        self._has_labels = False
        self._references: I32 = np.zeros(num_blocks, np.int32)
        self._lowest_free = num_blocks
        self._num_evicted = 0
        self.has_shared = False
        """Whether any block was ever shared: if not, the blocks of several slots are distinct."""

    def allocate(self, count: int) -> I32:
        """`count` blocks, each with one reference. The caller has checked `num_free`; IndexError otherwise."""
        if count > self.num_free:
            raise IndexError(f"{count} blocks asked for, {self.num_free} free")
        left = self._num_stacked - count
        if left >= 0:
            blocks = self._stack[left : self._num_stacked][::-1]
        else:
            # More than it takes, in whole batches, so that a full cache does not cost every step an eviction. The rest comes
            # off the stack in the order of its eviction: it makes no difference in how many calls blocks are asked for.
            evicted = self._evict(min(-(left // self._batch) * self._batch, self.num_free - self._num_stacked))
            blocks = np.concatenate((self._stack[: self._num_stacked][::-1], evicted[:-left]))
            left += evicted.size
            self._stack[:left] = evicted[evicted.size - left :][::-1]
        self._num_stacked = left
        self.num_free -= count
        if self.num_free < self._lowest_free:
            self._lowest_free = self.num_free
        self._references[blocks] = _ONE
        return blocks.astype(np.int32)

    def count(self, change: int) -> None:
        """So many more blocks have a reference (fewer, if negative), of a pool that never says which. The caller has checked
        `num_free`; IndexError otherwise."""
        if change > self.num_free:
            raise IndexError(f"{change} blocks asked for, {self.num_free} free")
        self.num_free -= change
        self._num_stacked -= change
        if self.num_free < self._lowest_free:
            self._lowest_free = self.num_free

    def share(self, blocks: I32) -> None:
        """One more reference to each of these (distinct) blocks: referenced ones, or free ones that are kept."""
        index = blocks.astype(np.intp)
        free = index[self._references[index] == 0]
        if free.size:
            if (self._labels[free] == 0).any():
                raise ValueError(f"blocks {free[self._labels[free] == 0].tolist()} are free and cannot be shared")
            self._take_out(free)
            self.num_free -= free.size
            if self.num_free < self._lowest_free:
                self._lowest_free = self.num_free
        self._references[index] += 1
        self.has_shared = True

    def release(self, blocks: I32) -> I32:
        """One reference less to each of these (distinct) blocks; those without any reference left, now free.

        Of those that are kept, the last one will be the first to be evicted.
        """
        index = blocks.astype(np.intp)  # as numpy indexes with: it makes these from any other integers, at each use
        left = self._references[index] - _ONE
        freed = blocks
        if np.count_nonzero(left):
            if left.min() < 0:
                raise ValueError(f"blocks {blocks[left < 0].tolist()} are released more often than referenced")
            self._references[index] = left
            index = index[left == 0]
            freed = blocks[left == 0]
        else:
            self._references[index] = _ZERO
        self._lay_down(index)
        self.num_free += freed.size
        return freed

    def keep(self, blocks: I32 | NDArray[np.intp], label: int) -> None:
        """These referenced blocks keep what they hold when they are freed. label: a positive number of the caller's."""
        self._labels[blocks] = label
        self._has_labels = True

    def discard(self, blocks: I32 | NDArray[np.intp]) -> None:
        """These blocks need not keep anything. The free ones of them go back to the stack."""
        kept = blocks[self._labels[blocks] != 0]
        self._labels[kept] = 0
        free = kept[self._references[kept] == 0]
        self._take_out(free)
        self._push(free[::-1])

    def discard_all(self) -> None:
        """No block needs to keep anything."""
        self.discard(np.flatnonzero(self._labels).astype(np.int32))
        self._has_labels = False

    def labels(self, blocks: I32 | NDArray[np.intp]) -> I32:
        """The label of each block; 0: it is not kept."""
        return self._labels[blocks]

    def num_referenced(self, blocks: I32) -> int:
        """How many of these have a reference: sharing the others takes them from the free ones."""
        return int(np.count_nonzero(self._references[blocks.astype(np.intp)]))

    def num_exclusive(self, blocks: I32) -> int:
        """How many of these have one reference only."""
        return int(np.count_nonzero(self._references[blocks] == 1))

    @property
    def num_unkept(self) -> int:
        """Free blocks that keep nothing: so many can be handed out before one is evicted."""
        return self._num_stacked

    def next_evictions(self, count: int) -> I32:
        """Up to `count` of the free blocks that are kept, in the order in which they would be evicted."""
        found: list[NDArray[np.intp]] = []
        number = self._last_chunk - len(self._queue)
        for blocks in self._queue:
            if count <= 0:
                break
            number += 1
            alive = blocks[self._taken_after[blocks] < number][:count] if self._num_dead else blocks[:count]
            found.append(alive)
            count -= alive.size
        return np.concatenate(found).astype(np.int32) if found else NO_I32

    def is_shared(self, block: int) -> bool:
        return bool(self._references[block] > 1)

    def _lay_down(self, freed: NDArray[np.intp]) -> None:
        """Blocks that lost their last reference, to where they belong."""
        if self._has_labels:
            labels = self._labels[freed]
            num_kept = np.count_nonzero(labels)
            if num_kept:
                kept, rest = freed[:num_kept], freed[num_kept:]  # of one slot, which ends with what is not full
                if np.count_nonzero(labels[:num_kept]) < num_kept:
                    is_kept = labels != 0
                    kept, rest = freed[is_kept], freed[~is_kept]
                self._enqueue(kept[::-1])
                freed = rest
        self._push(freed[::-1])

    def _push(self, blocks: I32 | NDArray[np.intp]) -> None:
        self._stack[self._num_stacked : self._num_stacked + blocks.size] = blocks
        self._num_stacked += blocks.size

    def _enqueue(self, blocks: NDArray[np.intp]) -> None:
        if self._num_dead > self.num_blocks:
            self._clean_queue()
        self._queue.append(blocks)
        self._last_chunk += 1

    def _take_out(self, blocks: I32 | NDArray[np.intp]) -> None:
        """These free, kept blocks leave the queue."""
        self._taken_after[blocks] = self._last_chunk
        self._num_dead += blocks.size

    def _clean_queue(self) -> None:
        """Drop the dead entries. Chunks keep their numbers, be they empty."""
        first = self._last_chunk - len(self._queue) + 1
        self._queue = deque(blocks[self._taken_after[blocks] < first + i] for i, blocks in enumerate(self._queue))
        while self._queue and not self._queue[0].size:
            self._queue.popleft()
        self._num_dead = 0

    def _evict(self, count: int) -> NDArray[np.intp]:
        """The `count` kept blocks that were freed longest ago; not kept any more."""
        found: list[NDArray[np.intp]] = []
        missing = count
        queue = self._queue
        while missing:
            blocks = queue.popleft()
            if self._num_dead:
                alive = blocks[self._taken_after[blocks] < self._last_chunk - len(queue)]
                self._num_dead -= blocks.size - alive.size
                blocks = alive
            if blocks.size > missing:
                queue.appendleft(blocks[missing:])
                blocks = blocks[:missing]
            found.append(blocks)
            missing -= blocks.size
        blocks = np.concatenate(found) if len(found) > 1 else found[0]
        labels = self._labels[blocks]
        self._labels[blocks] = _ZERO
        self._num_evicted += count
        if self._on_evict is not None:
            self._on_evict(blocks, labels)
        return blocks

    def statistics(self) -> BlockPoolStatistics:
        return BlockPoolStatistics(
            num_blocks=self.num_blocks,
            num_free=self.num_free,
            num_kept=self.num_free - self._num_stacked,
            num_shared=int((self._references > 1).sum()),
            num_evicted=self._num_evicted,
            peak_used=self.num_blocks - self._lowest_free,
        )

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        first = self._last_chunk - len(self._queue) + 1
        alive = [blocks[self._taken_after[blocks] < first + i] for i, blocks in enumerate(self._queue)]
        queued = np.concatenate(alive) if alive else np.zeros(0, np.intp)
        num_dead = sum(blocks.size for blocks in self._queue) - queued.size
        assert num_dead == self._num_dead, "dead entries are miscounted"
        free = np.concatenate((self._stack[: self._num_stacked], queued))
        assert np.unique(free).size == free.size, "a block is free twice"
        assert free.size == self.num_free, "free blocks are not where they belong"
        assert ((self._references == 0).sum()) == self.num_free, "a block is neither free nor referenced, or both"
        assert (self._references[free] == 0).all(), "a free block is referenced"
        assert (self._references >= 0).all(), "a reference count is negative"
        assert (self._labels[self._stack[: self._num_stacked]] == 0).all(), "a kept block is on the stack"
        assert (self._labels[queued] > 0).all(), "a block in the queue is not kept"
        assert self._has_labels or not self._labels.any(), "labels are overlooked"
