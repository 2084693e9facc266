"""The paged KV cache of a model some of whose layers have a sliding window: two groups of blocks (`kvcache.window_group`).

The first group has the layers without a window, and its block ids are those of plans and block tables. Each block of it may have a
partner in the second group, which holds the same tokens in the layers with a window. Plans say which (`StepPlan.partners`). So a
table of the second group is made of one of the first by a look-up of its blocks.

A block without a partner stands for the second group's block of zeros: no layer looks at it. A partner is cleared when it gets its
block, so that it holds nothing of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu.attention import AttentionBatch, KVCache, KVWrites, PagedCache, Scoring
from actorllm.model.inputs import StepInputs

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


class GroupBatch(AttentionBatch):
    """`AttentionBatch` of a group, for layers by their number in the model."""

    def __init__(
        self,
        numbers: dict[int, int],
        inputs: StepInputs,
        cache: KVCache,
        writes: KVWrites,
        queries_per_kv: int,
        window: int | None,
    ) -> None:
        """numbers: of the layers within the group."""
        self._numbers = numbers
        super().__init__(inputs, cache, writes, queries_per_kv, window)

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, scoring: Scoring | None = None
    ) -> torch.Tensor:
        return super().attend(self._numbers[layer], query, key_value, scoring)


class GroupedKVCache(PagedCache):
    """See the module docstring."""

    def __init__(
        self,
        windows: Sequence[int | None],
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        num_window_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """windows: of every layer; some are not None."""
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.num_blocks, self.block_size, self.padding_block = num_blocks, block_size, num_blocks + 1
        whole = [i for i, window in enumerate(windows) if window is None]
        windowed = [i for i, window in enumerate(windows) if window is not None]
        self._whole_numbers = {layer: number for number, layer in enumerate(whole)}
        self._windowed_numbers = {layer: number for number, layer in enumerate(windowed)}
        self.whole: KVCache | None = None
        """None: every layer has a window, and blocks of the first group hold nothing."""
        if whole:
            self.whole = KVCache(len(whole), num_kv_heads, head_dim, num_blocks, block_size, dtype)
        self.windowed = KVCache(len(windowed), num_kv_heads, head_dim, num_window_blocks, block_size, dtype)
        # By block of the first group, its block of zeros and that of padding included.
        self._partner: I32 = np.full(num_blocks + 2, self.windowed.zero_block, np.int32)
        self._partner[self.padding_block] = self.windowed.padding_block
        self._owner: I32 = np.full(num_window_blocks, -1, np.int32)

    def block_views(self, block: int) -> list[memoryview]:
        raise UnsupportedModelError("blocks of two KV groups are kept by no KV tier yet")

    def block_regions(self) -> list[NDArray[np.uint8]]:
        raise UnsupportedModelError("blocks of two KV groups are not copied between replicas yet")

    def pair(self, pairs: I32) -> None:
        """Blocks of the first group get partners. pairs: [2 * n], a block and its partner in turns, in their order.

        Raises ValueError for a block that there is not.
        """
        both = pairs.reshape(-1, 2)
        most = np.array((self.num_blocks, self.windowed.num_blocks))
        if (both < 0).any() or (both >= most).any():
            raise ValueError(f"blocks of the two KV groups must be below {most.tolist()}")
        for block, partner in both.tolist():
            owner = self._owner.item(partner)
            if owner >= 0 and self._partner.item(owner) == partner:
                self._partner[owner] = self.windowed.zero_block
            self._partner[block], self._owner[partner] = partner, block
        self.windowed.zero(np.unique(both[:, 1]))

    def release(self) -> None:
        if self.whole is not None:
            self.whole.release()
        self.windowed.release()

    def zero(self, block_ids: I32, slots: I32 | None = None) -> None:
        if self.whole is not None:
            self.whole.zero(block_ids)
        partners = self._partner[block_ids]
        self.windowed.zero(partners[partners < self.windowed.num_blocks])

    def clear(self, inputs: StepInputs, tokens: I64) -> None:
        if self.whole is not None:
            self.whole.clear(inputs, tokens)
        self.windowed.clear(self._of_windows(inputs), tokens)

    def copy(self, sources: I32, targets: I32) -> None:
        if self.whole is not None:
            self.whole.copy(sources, targets)
        both = np.stack((self._partner[sources], self._partner[targets]))
        both = both[:, (both < self.windowed.num_blocks).all(0)]
        self.windowed.copy(both[0], both[1])

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing: plans copy the blocks."""

    def attention(
        self, inputs: StepInputs, queries_per_kv: int, windows: Iterable[int | None]
    ) -> dict[int | None, AttentionBatch]:
        seen = self._of_windows(inputs)
        writes, fold = KVWrites(seen, self.windowed), queries_per_kv
        found: dict[int | None, AttentionBatch] = {
            window: GroupBatch(self._windowed_numbers, seen, self.windowed, writes, fold, window)
            for window in windows
            if window is not None
        }
        if self.whole is not None:
            writes = KVWrites(inputs, self.whole)
            found[None] = GroupBatch(self._whole_numbers, inputs, self.whole, writes, fold, None)
        return found

    def _of_windows(self, inputs: StepInputs) -> StepInputs:
        """The same step, with the blocks of the second group."""
        size, slots = self.block_size, inputs.kv_slots
        return replace(
            inputs,
            kv_slots=self._partner[slots // size].astype(np.int64) * size + slots % size,
            decode_table=self._partner[inputs.decode_table],
            prefill_tables=[self._partner[table] for table in inputs.prefill_tables],
        )
