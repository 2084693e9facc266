"""`BlockPool`: the blocks of the KV cache, free or referenced.

Invariants (`check_integrity`): every block is either on the free stack with a reference count of zero, or off it with a
positive one; never both, never twice. Blocks come off the stack in a fixed order, and two requests for m and n blocks
yield the same blocks as one for m + n, so that a replayed or simulated run allocates exactly as the live one did.

A freed block may be handed out again at once, although a step in flight still names it: steps run in launch order, so
the step that writes into it for its next owner runs after every step that was planned for the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32


@dataclass(frozen=True, slots=True)
class BlockPoolStatistics:
    num_blocks: int
    num_free: int
    num_shared: int
    """Blocks with more than one reference."""
    peak_used: int


class BlockPool:
    """A stack of free block ids and a reference count per block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks <= 0:
            raise ValueError(f"num_blocks={num_blocks} must be positive")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._stack: NDArray[np.intp] = np.arange(num_blocks - 1, -1, -1)  # block 0 is handed out first
        self._references: I32 = np.zeros(num_blocks, np.int32)
        self._lowest_free = num_blocks
        self.has_shared = False
        """Whether any block was ever shared: if not, the blocks of several slots are distinct."""

    def allocate(self, count: int) -> I32:
        """`count` blocks, each with one reference. The caller has checked `num_free`; IndexError otherwise."""
        left = self.num_free - count
        if left < 0:
            raise IndexError(f"{count} blocks asked for, {self.num_free} free")
        blocks = self._stack[left : self.num_free][::-1]
        self.num_free = left
        if left < self._lowest_free:
            self._lowest_free = left
        self._references[blocks] = 1
        return blocks.astype(np.int32)

    def share(self, blocks: I32) -> None:
        """One more reference to each of these blocks (prefix hits, siblings)."""
        if blocks.size and self._references[blocks].min() < 1:
            raise ValueError(f"blocks {blocks[self._references[blocks] < 1].tolist()} are free and cannot be shared")
        np.add.at(self._references, blocks, 1)
        self.has_shared = True

    def release(self, blocks: I32) -> I32:
        """One reference less to each of these (distinct) blocks; those that nobody references any more, now free."""
        index = blocks.astype(np.intp)  # as numpy indexes with: it makes these from any other integers, at each use
        left = self._references[index] - 1
        freed = blocks
        if np.count_nonzero(left):
            if left.min() < 0:
                raise ValueError(f"blocks {blocks[left < 0].tolist()} are released more often than referenced")
            freed = blocks[left == 0]
        self._references[index] = left
        self._stack[self.num_free : self.num_free + freed.size] = freed[::-1]
        self.num_free += freed.size
        return freed

    def is_shared(self, block: int) -> bool:
        return bool(self._references[block] > 1)

    def statistics(self) -> BlockPoolStatistics:
        return BlockPoolStatistics(
            num_blocks=self.num_blocks,
            num_free=self.num_free,
            num_shared=int((self._references > 1).sum()),
            peak_used=self.num_blocks - self._lowest_free,
        )

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        free = self._stack[: self.num_free]
        assert np.unique(free).size == free.size, "a block is on the free stack twice"
        assert ((self._references == 0).sum()) == self.num_free, "a block is neither free nor referenced, or both"
        assert (self._references[free] == 0).all(), "a free block is referenced"
        assert (self._references >= 0).all(), "a reference count is negative"
