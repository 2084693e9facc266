"""The paged KV cache of a worker, and attention over it.

Invariants: the pool is finite at all times (it starts as zeros, and a block that received non-finite values is zeroed by
the scheduler's plan before anyone else reads it), because padded positions are read and multiplied by 0. Block ids are
those of the scheduler, [0, num_blocks); two more blocks belong to the pool itself: one stays zero and fills up short
block tables, one takes the writes of padding rows.

Layout, per layer: head-major, [2 * num_kv_heads, num_blocks + 2, block_size * head_dim], keys in the first half. One
`index_select` over the block ids of a batch then yields keys and values as [2, num_kv_heads * rows, length, head_dim],
ready for batched products, without a permutation. Decode works on all rows at once, with the query heads that share a
key head folded into one product; only rows of very different length are split into groups. Prefill works row by row.

`KVCache` is owned by the runner; `AttentionBatch` is made by it once per step and passed through the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.inputs import StepInputs

SMALL_GROUP_ELEMENTS = 80_000
"""Up to this many key elements, batched products in float32 (no set-up) beat those in bfloat16 (10 µs each)."""

GROUP_OVERHEAD_ELEMENTS = 200_000
"""Key elements that take as long as the fixed cost of one more group: less padding than that is not worth a split."""

MAX_GROUP_BYTES = 32 << 20
"""Gathered keys and values of one group; bounds the working memory of decode."""

LENGTH_STEP = 64
"""bfloat16 products are padded to a multiple of this: every new shape costs oneDNN about half a millisecond."""

QUERY_TILE = 256
"""Prompt tokens that attend together; bounds the mask and skips what lies above the diagonal."""


class KVCache:
    """Keys and values of every layer, by block."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.zero_block = num_blocks
        self.padding_block = num_blocks + 1
        # Fresh zero pages are only mapped when they are first written.
        self.pool = torch.zeros(num_layers, 2 * num_kv_heads, num_blocks + 2, block_size * head_dim, dtype=dtype)
        self.blocks = list(self.pool.unbind(0))  # per layer [2 * num_kv_heads, num_blocks + 2, block_size * head_dim]
        tokens = self.pool.view(num_layers, 2 * num_kv_heads, (num_blocks + 2) * block_size, head_dim)
        self.tokens = list(tokens.unbind(0))  # per layer [2 * num_kv_heads, num_token_slots, head_dim]

    def zero(self, block_ids: NDArray[np.int32]) -> None:
        self.pool.index_fill_(2, torch.from_numpy(block_ids), 0)

    def copy(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """All at once: a target that is also a source is read before it is written."""
        for layer in self.blocks:
            layer.index_copy_(1, torch.from_numpy(targets).long(), layer.index_select(1, torch.from_numpy(sources)))


@dataclass(slots=True)
class DecodeGroup:
    """Decode rows [start, end) of a step, padded to one length."""

    start: int
    end: int
    block_ids: torch.Tensor  # [rows * blocks_per_row]
    bias: torch.Tensor  # [num_kv_heads * rows, queries_per_kv, length]: 0 where a row may look, -inf elsewhere
    is_small: bool


@dataclass(slots=True)
class PrefillTile:
    """Tokens [start, end) of a step, of one row, and the part [first, last) of the row's gathered keys they look at."""

    start: int
    end: int
    first: int
    last: int
    bias: torch.Tensor | None  # [end - start, last - first]; None: exactly causal


@dataclass(slots=True)
class PrefillRow:
    """The tokens of one prefill row, with the blocks of its context."""

    block_ids: torch.Tensor  # [blocks_per_row]
    tiles: list[PrefillTile]


class AttentionBatch:
    """Who looks at what in one step, for one sliding window (None: everything before)."""

    def __init__(self, inputs: StepInputs, cache: KVCache, queries_per_kv: int, window: int | None) -> None:
        self.kv_slots = torch.from_numpy(inputs.kv_slots)  # [num_tokens]
        self.queries_per_kv = queries_per_kv
        self.scale = cache.head_dim**-0.5
        self._cache = cache
        self._window = window
        self.groups = self._decode_groups(inputs) if inputs.num_decodes else []
        self.rows = [
            self._prefill_row(inputs, start, count, first)
            for start, count, first in zip(
                inputs.prefill_starts, inputs.prefill_counts, inputs.prefill_first, strict=True
            )
        ]

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Store this step's keys and values, then attend.

        query: [num_tokens, num_heads, head_dim]; key_value: [num_tokens, 2 * num_kv_heads, head_dim].
        Returns [num_tokens, num_heads * head_dim].
        """
        self._cache.tokens[layer].index_copy_(1, self.kv_slots, key_value.transpose(0, 1))
        blocks = self._cache.blocks[layer]
        num_tokens = query.shape[0]
        if len(self.groups) == 1 and self.groups[0].end == num_tokens:
            return self._decode(blocks, query, self.groups[0])
        out = query.new_zeros(num_tokens, query.shape[1] * query.shape[2])
        for group in self.groups:
            out[group.start : group.end] = self._decode(blocks, query[group.start : group.end], group)
        for row in self.rows:
            self._prefill(blocks, query, row, out)
        return out

    def _decode(self, blocks: torch.Tensor, query: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        heads, dim, fold = self._cache.num_kv_heads, self._cache.head_dim, self.queries_per_kv
        rows = query.shape[0]
        gathered = blocks.index_select(1, group.block_ids).view(2, heads * rows, -1, dim)
        q = query.view(rows, heads, fold, dim).transpose(0, 1).reshape(heads * rows, fold, dim)
        if group.is_small:
            gathered, q = gathered.float(), q.float()
        key, value = gathered.unbind(0)  # [num_kv_heads * rows, length, head_dim]
        scores = torch.baddbmm(group.bias, q, key.transpose(1, 2), alpha=self.scale)
        out = torch.bmm(torch.softmax(scores, -1), value)  # [num_kv_heads * rows, queries_per_kv, head_dim]
        return out.to(query.dtype).view(heads, rows, fold * dim).transpose(0, 1).reshape(rows, heads * fold * dim)

    def _prefill(self, blocks: torch.Tensor, query: torch.Tensor, row: PrefillRow, out: torch.Tensor) -> None:
        heads, dim, fold = self._cache.num_kv_heads, self._cache.head_dim, self.queries_per_kv
        key, value = blocks.index_select(1, row.block_ids).view(2, heads, 1, -1, dim).unbind(0)
        for tile in row.tiles:
            tokens = tile.end - tile.start
            q = query[tile.start : tile.end].view(tokens, heads, fold, dim).permute(1, 2, 0, 3)
            attended = torch.nn.functional.scaled_dot_product_attention(
                q,  # [num_kv_heads, queries_per_kv, tokens, head_dim]
                key[:, :, tile.first : tile.last].expand(-1, fold, -1, -1),
                value[:, :, tile.first : tile.last].expand(-1, fold, -1, -1),
                attn_mask=tile.bias,
                is_causal=tile.bias is None,
                scale=self.scale,
            )
            out[tile.start : tile.end].view(tokens, heads, fold, dim).copy_(attended.permute(2, 0, 1, 3))

    def _decode_groups(self, inputs: StepInputs) -> list[DecodeGroup]:
        """Rows come ordered by falling length whenever their lengths differ enough for a split to pay."""
        size = self._cache.block_size
        lengths = inputs.decode_lengths
        first_visible = np.maximum(lengths - self._window, 0) if self._window is not None else np.zeros_like(lengths)
        first_block = first_visible // size
        num_blocks = -(-lengths // size) - first_block
        elements_per_block = self._cache.num_kv_heads * self._cache.head_dim * size
        is_exact = self._cache.pool.dtype == torch.float32
        max_blocks_total = max(1, MAX_GROUP_BYTES // (2 * elements_per_block * self._cache.pool.element_size()))
        groups = []
        start, total = 0, len(lengths)
        while start < total:
            longest = int(num_blocks[start:].max())
            end = total
            if inputs.is_sorted:
                saved = (total - np.arange(start, total)) * (longest - num_blocks[start:]) * elements_per_block
                worth = np.flatnonzero(saved > GROUP_OVERHEAD_ELEMENTS)
                end = start + max(1, int(worth[0])) if worth.size else total
            end = min(end, start + max(1, max_blocks_total // longest))
            longest = int(num_blocks[start:end].max())
            is_small = (end - start) * longest * elements_per_block <= SMALL_GROUP_ELEMENTS
            if not is_exact and not is_small:
                step = max(LENGTH_STEP // size, 1 << max(0, longest.bit_length() - 4))
                longest = -(-longest // step) * step
            groups.append(
                self._decode_group(inputs, start, end, longest, first_block, num_blocks, first_visible, is_small)
            )
            start = end
        return groups

    def _decode_group(
        self,
        inputs: StepInputs,
        start: int,
        end: int,
        blocks_per_row: int,
        first_block: NDArray[np.int64],
        num_blocks: NDArray[np.int64],
        first_visible: NDArray[np.int64],
        is_small: bool,
    ) -> DecodeGroup:
        size = self._cache.block_size
        table = inputs.decode_table  # [num_decodes, max_blocks]
        columns = np.arange(blocks_per_row)
        used = columns < num_blocks[start:end, None]
        if self._window is None:
            ids = np.full((end - start, blocks_per_row), self._cache.zero_block, np.int32)
            width = min(blocks_per_row, table.shape[1])
            ids[:, :width] = table[start:end, :width]
        else:
            where = np.minimum(first_block[start:end, None] + columns, table.shape[1] - 1)
            ids = np.take_along_axis(table[start:end], where, 1)
        ids[~used] = self._cache.zero_block
        offset = first_block[start:end, None] * size
        position = np.arange(blocks_per_row * size) + offset
        hidden = position >= inputs.decode_lengths[start:end, None]
        if self._window is not None:
            hidden |= position < first_visible[start:end, None]
        dtype = torch.float32 if is_small else self._cache.pool.dtype
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        heads = self._cache.num_kv_heads
        bias = bias.view(1, end - start, 1, -1).expand(heads, -1, self.queries_per_kv, -1)
        bias = bias.reshape(heads * (end - start), self.queries_per_kv, -1)
        return DecodeGroup(start, end, torch.from_numpy(ids.reshape(-1)), bias, is_small)

    def _prefill_row(self, inputs: StepInputs, start: int, count: int, first_position: int) -> PrefillRow:
        """Tiles of one row; the gathered context starts at the first block that any of its tokens sees."""
        size, window = self._cache.block_size, self._window
        index = inputs.prefill_starts.index(start)
        length = first_position + count
        oldest = 0 if window is None else max(0, first_position + 1 - window)
        first_block = oldest // size
        offset = first_block * size
        ids = inputs.prefill_tables[index][first_block : -(-length // size)]
        tiles = []
        for a in range(0, count, QUERY_TILE):
            b = min(count, a + QUERY_TILE)
            low = offset if window is None else max(offset, first_position + a + 1 - window)
            high = first_position + b
            bias = None
            if low < first_position + a or (window is not None and window < b - a):
                query = torch.arange(first_position + a, high).unsqueeze(1)
                key = torch.arange(low, high)
                hidden = key > query
                if window is not None:
                    hidden |= key <= query - window
                bias = torch.zeros(hidden.shape, dtype=self._cache.pool.dtype).masked_fill_(hidden, float("-inf"))
            tiles.append(PrefillTile(start + a, start + b, low - offset, high - offset, bias))
        return PrefillRow(torch.from_numpy(ids), tiles)
