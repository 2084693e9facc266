"""The paged KV cache of a worker, and attention over it.

Invariants: the pool is finite at all times (it starts as zeros, and a block that received non-finite values is zeroed by
the scheduler's plan before anyone else reads it), because padded positions are read and multiplied by 0. Block ids are
those of the scheduler, [0, num_blocks); two more blocks belong to the pool itself: one stays zero and fills up short
block tables, one takes the writes of padding tokens.

Layout, per layer: head-major, [2 * num_kv_heads, num_blocks + 2, block_size * head_dim], keys in the first half. One
`index_select` over the block ids of a batch then yields keys and values as [2, num_kv_heads * rows, length, head_dim],
ready for batched products, without a permutation. Decode works on all rows at once, with the query heads that share a
key head folded into one product; only rows of very different length are split into groups. What was gathered for a
group is kept, and in the next step of the same rows only the new token is added to it (`DecodeContext`). Prefill works
row by row.

`KVCache` is owned by the runner; `AttentionBatch` is made from it once per step and passed through the layers.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.inputs import StepInputs

I64 = NDArray[np.int64]

SMALL_GROUP_ELEMENTS = 80_000
"""Up to this many key elements, batched products in float32 (no set-up) beat those in bfloat16 (10 µs each)."""

GROUP_OVERHEAD_ELEMENTS = 200_000
"""Key elements that take as long as the fixed cost of one more group: less padding than that is not worth a split."""

MAX_GROUP_BYTES = 32 << 20
"""Gathered keys and values of one group in one layer."""

MAX_CONTEXT_BYTES = 512 << 20
"""Gathered keys and values that are kept for the next step, over all layers; beyond that, they are gathered anew."""

LENGTH_STEP = 32
"""bfloat16 products are padded to a multiple of this: every new shape costs oneDNN about half a millisecond."""

QUERY_TILE = 256
"""Prompt tokens that attend together: skips most of what lies above the diagonal, and keeps the scores in the cache."""

MAX_TILE_SCORES = 4 << 20
"""Scores of one tile; over long contexts, tiles get smaller than QUERY_TILE."""

SMALL_TILE_PRODUCTS = 16 << 20
"""Up to this many multiplications, products in float32 beat those in bfloat16 with a shape oneDNN has not seen."""


class Scratch:
    """Memory that is used again in every step: fresh pages would cost more than what is done with them."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def split(self, sizes: list[int]) -> list[torch.Tensor]:
        """Parts of these sizes that do not overlap; the content is that of the last use."""
        self._reserve(sum(sizes))
        return list(torch.split(self._bytes[: sum(sizes)], sizes))

    def overlay(self, sizes: list[int]) -> list[torch.Tensor]:
        """The same memory for all, for parts that are not needed at the same time."""
        self._reserve(max(sizes))
        return [self._bytes[:size] for size in sizes]

    def _reserve(self, size: int) -> None:
        if size > len(self._bytes):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # let the old memory go first
            self._bytes = torch.empty(size + size // 4, dtype=torch.uint8)


def _zero_pages(num_bytes: int) -> torch.Tensor:
    """Zeros that take no memory before they are written; `torch.zeros` writes them all."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


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
        shape = (num_layers, 2 * num_kv_heads, num_blocks + 2, block_size * head_dim)
        self.pool = _zero_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.blocks = list(self.pool.unbind(0))  # per layer [2 * num_kv_heads, num_blocks + 2, block_size * head_dim]
        self.context: DecodeContext | None = None
        self.kept, self.passing = Scratch(), Scratch()  # of the context, and of groups that are gathered in every step
        tokens = self.pool.view(num_layers, 2 * num_kv_heads, (num_blocks + 2) * block_size, head_dim)
        self.tokens = list(tokens.unbind(0))  # per layer [2 * num_kv_heads, num_token_slots, head_dim]

    def zero(self, block_ids: NDArray[np.int32]) -> None:
        self.context = None
        self.pool.index_fill_(2, torch.from_numpy(block_ids.astype(np.int64)), 0)

    def copy(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """All at once: a target that is also a source is read before it is written."""
        self.context = None
        to, where = torch.from_numpy(targets.astype(np.int64)), torch.from_numpy(sources.astype(np.int64))
        for layer in self.blocks:
            layer.index_copy_(1, to, layer.index_select(1, where))


@dataclass(slots=True)
class DecodeGroup:
    """Decode rows [start, end) of a step, padded to one length."""

    start: int
    end: int
    block_ids: torch.Tensor  # [rows * blocks_per_row]
    length: int
    bias: torch.Tensor  # [num_kv_heads * rows, queries_per_kv, length]: 0 where a row may look, -inf elsewhere
    gathered: list[torch.Tensor]
    """Per layer [2 * num_kv_heads, rows * blocks_per_row, block_size * head_dim]; one for all when it is not kept."""
    tokens: list[torch.Tensor]  # the same memory as [2 * num_kv_heads, rows * length, head_dim]
    keys: list[torch.Tensor]  # its first half as [num_kv_heads * rows, head_dim, length]
    values: list[torch.Tensor]  # its second half as [num_kv_heads * rows, length, head_dim]
    is_small: bool
    """Computed in float32 although the model is bfloat16."""
    is_kept: bool
    new_slots: torch.Tensor | None = None  # [rows] row * length + position of the new token; None: gather everything


@dataclass(slots=True)
class DecodeContext:
    """The gathered keys and values of the decode rows after a step, as long as rows and blocks stay what they are."""

    version: int
    lengths: I64  # [num_decodes]
    groups: list[DecodeGroup]


@dataclass(slots=True)
class PrefillTile:
    """Tokens [start, end) of a step, of one row, and the part [first, last) of the row's gathered keys they look at."""

    start: int
    end: int
    first: int
    last: int
    bias: torch.Tensor  # [end - start, keys]: 0 or -inf, for the last `keys` of them; they look at all before those
    is_small: bool
    """Computed in float32 although the model is bfloat16."""


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
        new = key_value.transpose(0, 1)  # [2 * num_kv_heads, num_tokens, head_dim]
        self._cache.tokens[layer].index_copy_(1, self.kv_slots, new)
        if len(self.groups) == 1 and self.groups[0].end == query.shape[0]:
            return self._decode(layer, query, new, self.groups[0])
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        for group in self.groups:
            rows = slice(group.start, group.end)
            out[rows] = self._decode(layer, query[rows], new[:, rows], group)
        for row in self.rows:
            self._prefill(layer, query, row, out)
        return out

    def _decode(self, layer: int, query: torch.Tensor, new: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        heads, dim, fold = self._cache.num_kv_heads, self._cache.head_dim, self.queries_per_kv
        rows, is_small, kept = query.shape[0], group.is_small, layer if group.is_kept else 0
        if group.new_slots is not None:
            group.tokens[kept].index_copy_(1, group.new_slots, new.float() if is_small else new)
        elif is_small:
            group.gathered[kept].copy_(self._cache.blocks[layer].index_select(1, group.block_ids))
        else:
            torch.index_select(self._cache.blocks[layer], 1, group.block_ids, out=group.gathered[kept])
        if rows == 1:
            q = query.view(heads, fold, dim)
        else:
            q = query.view(rows, heads, fold, dim).transpose(0, 1).reshape(heads * rows, fold, dim)
        if is_small:
            q = q.float()
        scores = torch.baddbmm(group.bias, q, group.keys[kept], alpha=self.scale)
        out = torch.bmm(
            torch.softmax(scores, -1), group.values[kept]
        )  # [num_kv_heads * rows, queries_per_kv, head_dim]
        if is_small:
            out = out.to(query.dtype)
        if rows == 1:
            return out.view(1, heads * fold * dim)
        return out.view(heads, rows, fold * dim).transpose(0, 1).reshape(rows, heads * fold * dim)

    def _prefill(self, layer: int, query: torch.Tensor, row: PrefillRow, out: torch.Tensor) -> None:
        heads, dim, fold = self._cache.num_kv_heads, self._cache.head_dim, self.queries_per_kv
        blocks = self._cache.blocks[layer].index_select(1, row.block_ids)
        key, value = blocks.view(2, heads, -1, dim).unbind(0)  # [num_kv_heads, length, head_dim]
        for tile in row.tiles:
            num_tokens, length = tile.end - tile.start, tile.last - tile.first
            q = query[tile.start : tile.end].view(num_tokens, heads, fold, dim)
            q = q.permute(1, 2, 0, 3).reshape(heads, fold * num_tokens, dim)
            k, v = key[:, tile.first : tile.last], value[:, tile.first : tile.last]
            if tile.is_small:
                q, k, v = q.float(), k.float(), v.float()
            scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=self.scale)
            scores.view(heads, fold, num_tokens, length)[..., -tile.bias.shape[1] :].add_(tile.bias)
            attended = torch.bmm(torch.softmax(scores, -1), v).view(heads, fold, num_tokens, dim)
            out[tile.start : tile.end].view(num_tokens, heads, fold, dim).copy_(attended.permute(2, 0, 1, 3))

    def _decode_groups(self, inputs: StepInputs) -> list[DecodeGroup]:
        """The groups of the step before with one more token per row, or new ones."""
        cache, context = self._cache, self._cache.context
        if self._window is not None:
            return self._new_groups(inputs)
        if (
            context is not None
            and context.version == inputs.decode_version
            and np.array_equal(context.lengths + 1, inputs.decode_lengths)
            and all(int(inputs.decode_lengths[g.start : g.end].max()) <= g.length for g in context.groups)
        ):
            for group in context.groups:
                self._extend(group, inputs)
            context.lengths = inputs.decode_lengths
            return context.groups
        groups = self._new_groups(inputs)
        is_kept = all(group.is_kept for group in groups)
        cache.context = DecodeContext(inputs.decode_version, inputs.decode_lengths, groups) if is_kept else None
        return groups

    def _extend(self, group: DecodeGroup, inputs: StepInputs) -> None:
        """One more token per row: where it goes, and that it may be looked at."""
        rows = group.end - group.start
        if rows == 1:
            only = int(inputs.decode_positions[group.start])
            group.new_slots = torch.tensor([only])
            group.bias[:, :, only] = 0
            return
        row, position = np.arange(rows), inputs.decode_positions[group.start : group.end]
        group.new_slots = torch.from_numpy(row * group.length + position)
        bias = group.bias.view(self._cache.num_kv_heads, rows, self.queries_per_kv, group.length)
        bias[:, torch.from_numpy(row), :, torch.from_numpy(position)] = 0

    def _new_groups(self, inputs: StepInputs) -> list[DecodeGroup]:
        """Rows come ordered by falling length whenever their lengths differ enough for a split to pay."""
        cache, size = self._cache, self._cache.block_size
        lengths = inputs.decode_lengths
        first_visible = np.maximum(lengths - self._window, 0) if self._window is not None else np.zeros_like(lengths)
        first_block = first_visible // size
        num_blocks = -(-lengths // size) - first_block
        block_elements = cache.num_kv_heads * cache.head_dim * size
        is_exact = cache.pool.dtype == torch.float32
        most_blocks = max(1, MAX_GROUP_BYTES // (2 * block_elements * cache.pool.element_size()))
        bounds: list[tuple[int, int, int, bool]] = []
        start, total = 0, len(lengths)
        while start < total:
            longest = int(num_blocks[start:].max())
            end = total
            if inputs.is_sorted:
                saved = (total - np.arange(start, total)) * (longest - num_blocks[start:]) * block_elements
                worth = np.flatnonzero(saved > GROUP_OVERHEAD_ELEMENTS)
                end = start + max(1, int(worth[0])) if worth.size else total
            end = min(end, start + max(1, most_blocks // longest))
            is_small = not is_exact and (end - start) * longest * block_elements <= SMALL_GROUP_ELEMENTS
            if not is_exact and not is_small:
                step = max(1, LENGTH_STEP // size, 1 << max(0, longest.bit_length() - 4))
                longest = -(-longest // step) * step
            bounds.append((start, end, longest, is_small))
            start = end
        width = [4 if is_small else cache.pool.element_size() for _, _, _, is_small in bounds]
        sizes = [2 * block_elements * (b[1] - b[0]) * b[2] * w for b, w in zip(bounds, width, strict=True)]
        is_kept = self._window is None and sum(sizes) * len(cache.blocks) <= MAX_CONTEXT_BYTES
        buffers = cache.kept.split([n * len(cache.blocks) for n in sizes]) if is_kept else cache.passing.overlay(sizes)
        return [
            self._new_group(inputs, b, buffer, first_block, num_blocks, first_visible, is_kept)
            for b, buffer in zip(bounds, buffers, strict=True)
        ]

    def _new_group(
        self,
        inputs: StepInputs,
        bounds: tuple[int, int, int, bool],
        buffer: torch.Tensor,
        first_block: I64,
        num_blocks: I64,
        first_visible: I64,
        is_kept: bool,
    ) -> DecodeGroup:
        start, end, blocks_per_row, is_small = bounds
        cache, size, rows = self._cache, self._cache.block_size, slice(start, end)
        table = inputs.decode_table  # [num_decodes, max_blocks]
        columns = np.arange(blocks_per_row)
        where = np.minimum(first_block[rows, None] + columns, table.shape[1] - 1)
        ids = np.take_along_axis(table[rows], where, 1)  # [rows, blocks_per_row]
        ids[columns >= num_blocks[rows, None]] = cache.zero_block
        position = np.arange(blocks_per_row * size) + first_block[rows, None] * size
        hidden = (position >= inputs.decode_lengths[rows, None]) | (position < first_visible[rows, None])
        dtype = torch.float32 if is_small else cache.pool.dtype
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        heads, num_rows = cache.num_kv_heads, end - start
        bias = bias.view(1, num_rows, 1, -1).expand(heads, -1, self.queries_per_kv, -1).contiguous()
        gathered = buffer.view(dtype).view(-1, 2 * heads, num_rows * blocks_per_row, size * cache.head_dim)
        length = blocks_per_row * size
        tokens = gathered.view(-1, 2 * heads, num_rows * length, cache.head_dim)
        halves = gathered.view(-1, 2, heads * num_rows, length, cache.head_dim)
        return DecodeGroup(
            start=start,
            end=end,
            block_ids=torch.from_numpy(ids.reshape(-1)),
            length=length,
            bias=bias.view(heads * num_rows, self.queries_per_kv, -1),
            gathered=list(gathered.unbind(0)),
            tokens=list(tokens.unbind(0)),
            keys=list(halves[:, 0].transpose(2, 3).unbind(0)),
            values=list(halves[:, 1].unbind(0)),
            is_small=is_small,
            is_kept=is_kept,
        )

    def _prefill_row(self, inputs: StepInputs, start: int, count: int, first_position: int) -> PrefillRow:
        """Tiles of one row; the gathered context starts at the first block that any of its tokens sees."""
        size, window = self._cache.block_size, self._window
        index = inputs.prefill_starts.index(start)
        length = first_position + count
        oldest = 0 if window is None else max(0, first_position + 1 - window)
        first_block = oldest // size
        offset = first_block * size
        ids = inputs.prefill_tables[index][first_block : -(-length // size)]
        num_heads, dim = self._cache.num_kv_heads * self.queries_per_kv, self._cache.head_dim
        is_exact = self._cache.pool.dtype == torch.float32
        tile_size = max(16, min(QUERY_TILE, MAX_TILE_SCORES // (num_heads * length)))
        tiles = []
        for a in range(0, count, tile_size):
            b = min(count, a + tile_size)
            low = offset if window is None else max(offset, first_position + a + 1 - window)
            high = first_position + b
            is_small = not is_exact and num_heads * dim * (b - a) * (high - low) <= SMALL_TILE_PRODUCTS
            query = torch.arange(first_position + a, high).unsqueeze(1)
            key = torch.arange(low if window is not None else first_position + a, high)
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            dtype = torch.float32 if is_small else self._cache.pool.dtype
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            tiles.append(PrefillTile(start + a, start + b, low - offset, high - offset, bias, is_small))
        return PrefillRow(torch.from_numpy(ids), tiles)
