"""The paged KV cache with 8 bits for a number (`kv_cache_dtype="int8"`), and attention over it.

A block is rounded once, when its last token is stored: keys by channel, values by token. Each row of codes has a scale and an
offset in float32 behind it. Until then a block is in the *tail* of its slot, in the type of the model.

A token attends to its own block as it was computed, and to all blocks before that as they were rounded. This depends on its
position only. So streams are the same whether a prompt comes in chunks, is found in the prefix cache, or is computed once more.
For the same reason tiles of prompts are fixed, and output that is computed once more attends as decode rows do
(`attention.KVCache`).

Layout, per layer: `keys` [num_blocks + 2, num_kv_heads * head_dim, block_size + 8] and `values`
[num_blocks + 2, num_kv_heads * block_size, head_dim + 8], both uint8. Their rows are what
`quantized::embedding_bag_byte_rowwise_offsets` sums up. `tails` are blocks as those of `attention.KVLayer`. A slot has one tail,
or two where drafts may reach into the next block before the one before it is final.

Invariant: what a row may read is finite between steps, as in `attention`. A tail is cleared when the first token of a block goes
there; a slot's new owner finds nothing of the old one.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.cpu.attention import (
    FIXED_TILE,
    SMALL_TILE_PRODUCTS,
    AttentionBatch,
    Chunk,
    DecodeContext,
    KVLayer,
    PagedCache,
    RowsOfBlocks,
    Scoring,
    TokenPlaces,
    blocks_in,
    capped_,
    empty_pages,
    first_seen,
    is_before,
    share_beside_sinks,
    views_of_block,
    zero_pages,
)
from actorllm.model.inputs import StepInputs

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

ROW_BYTES = 8
"""Behind the codes of a row: its scale and its offset."""

_pack = torch.ops.quantized.embedding_bag_byte_prepack
_unpack = torch.ops.quantized.embedding_bag_byte_unpack
_sums = torch.ops.quantized.embedding_bag_byte_rowwise_offsets


def block_bytes(num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Of one block in one layer."""
    return num_kv_heads * (head_dim * (block_size + ROW_BYTES) + block_size * (head_dim + ROW_BYTES))


class Int8Layer:
    """Views of one layer."""

    __slots__ = ("key_rows", "keys", "tails", "value_rows", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, tails: KVLayer) -> None:
        self.keys, self.values, self.tails = keys, values, tails
        self.key_rows = keys.view(-1, keys.shape[-1])  # row (block * num_kv_heads + head) * head_dim + dimension
        self.value_rows = values.view(-1, values.shape[-1])  # row (block * num_kv_heads + head) * block_size + offset


class Int8KVCache(PagedCache):
    """See the module docstring."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        num_slots: int,
        tails_per_slot: int = 1,
        pages: Callable[[int], mmap.mmap] = zero_pages,
    ) -> None:
        """num_slots: slots of rows are below this. tails_per_slot: 2 where a step may store drafts of the next block. pages: where
        its memory is from."""
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.num_blocks, self.block_size = num_blocks, block_size
        self.zero_block, self.padding_block = num_blocks, num_blocks + 1
        self.num_slots, self.tails_per_slot = num_slots, tails_per_slot
        shapes = (
            (num_layers, num_blocks + 2, num_kv_heads * head_dim, block_size + ROW_BYTES),
            (num_layers, num_blocks + 2, num_kv_heads * block_size, head_dim + ROW_BYTES),
        )
        # One more slot for padding, behind all others.
        tails = (num_layers, (num_slots + 1) * tails_per_slot, 2 * num_kv_heads, block_size * head_dim)
        self._new_pages = pages
        self._pages: list[mmap.mmap] = []
        keys, values = (self._mapped(shape, torch.uint8) for shape in shapes)
        self.tails = self._mapped(tails, dtype)
        self.keys, self.values = keys, values
        self.layers = [
            Int8Layer(k, v, KVLayer(t, num_kv_heads, head_dim, block_size))
            for k, v, t in zip(keys.unbind(0), values.unbind(0), self.tails.unbind(0), strict=True)
        ]
        rows = (max(num_blocks + 2, 2 * tails[1])) * num_kv_heads * max(head_dim, block_size)
        self.index_type: Any = np.int32 if rows <= np.iinfo(np.int32).max else np.int64
        self.scoring = Scoring(head_dim**-0.5)
        self.decodes: dict[int | None, DecodeContext] = {}

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._pages.append(self._new_pages(math.prod(shape) * dtype.itemsize))
        return torch.frombuffer(self._pages[-1], dtype=torch.uint8).view(dtype).view(shape)

    def release(self) -> None:
        for pages in self._pages:
            empty_pages(pages)

    def block_views(self, block: int) -> list[memoryview]:
        of_layers = len(self.layers), self.num_blocks + 2, block
        return [view for pages in self._pages[:2] for view in views_of_block(pages, *of_layers)]

    def block_regions(self) -> list[NDArray[np.uint8]]:
        return [blocks_in(pages, len(self.layers), self.num_blocks + 2) for pages in self._pages[:2]]

    def zero(self, block_ids: I32, slots: I32 | None = None) -> None:
        where = torch.from_numpy(block_ids.astype(np.int64))
        self.keys.index_fill_(1, where, 0)
        self.values.index_fill_(1, where, 0)
        if slots is not None:
            tails = slots.astype(np.int64)[:, None] * self.tails_per_slot + np.arange(self.tails_per_slot)
            self.tails.index_fill_(1, torch.from_numpy(tails.reshape(-1)), 0)

    def clear(self, inputs: StepInputs, tokens: I64) -> None:
        positions = inputs.positions[tokens]
        tails = torch.from_numpy(self.tail_of(inputs.token_slots[tokens], positions))
        offset = torch.from_numpy(positions % self.block_size)
        for layer in self.layers:
            layer.tails.keys[tails, :, :, offset] = 0
            layer.tails.values[tails, :, offset] = 0
        # Its codes are made again when the token that belongs there is stored.
        is_last = positions % self.block_size == self.block_size - 1
        self.zero((inputs.kv_slots[tokens][is_last] // self.block_size).astype(np.int32))

    def copy(self, sources: I32, targets: I32) -> None:
        to, where = torch.from_numpy(targets.astype(np.int64)), torch.from_numpy(sources.astype(np.int64))
        for layer in self.layers:
            for rows in (layer.keys, layer.values):
                rows.index_copy_(0, to, rows.index_select(0, where))

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        # Now, since the next step goes on in the tail of the slot that is shared.
        columns = np.array(pairs, np.int64).T[:, :, None] * self.tails_per_slot + np.arange(self.tails_per_slot)
        to, where = torch.from_numpy(columns.reshape(2, -1)).unbind(0)
        self.tails.index_copy_(1, to, self.tails.index_select(1, where))

    def attention(
        self, inputs: StepInputs, queries_per_kv: int, windows: Iterable[int | None]
    ) -> dict[int | None, AttentionBatch]:
        writes = Int8Writes(inputs, self)
        return {window: Int8AttentionBatch(inputs, self, writes, queries_per_kv, window) for window in windows}

    def tail_of(self, slots: I32 | I64, positions: I64) -> I64:
        """Which tails the tokens of these slots and positions go to; padding has a negative slot."""
        slots = np.where(slots < 0, self.num_slots, slots).astype(np.int64)
        return slots * self.tails_per_slot + positions // self.block_size % self.tails_per_slot

    def round_(self, layer: Int8Layer, keys: torch.Tensor, values: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Let blocks hold these. keys: [n, num_kv_heads, head_dim, block_size]; values: [n, num_kv_heads, block_size, head_dim]."""
        for rows, numbers in ((layer.keys, keys), (layer.values, values)):
            packed = _pack(numbers.reshape(-1, numbers.shape[-1]).float())
            rows.index_copy_(0, block_ids, packed.view(len(block_ids), rows.shape[1], rows.shape[2]))

    def rounded(self, layer: Int8Layer, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What blocks hold, float32: keys and values, both [num_kv_heads, n * block_size, head_dim]."""
        n, heads, dim, size = len(block_ids), self.num_kv_heads, self.head_dim, self.block_size
        keys = _unpack(layer.keys.index_select(0, block_ids).view(-1, size + ROW_BYTES)).view(n, heads, dim, size)
        values = _unpack(layer.values.index_select(0, block_ids).view(-1, dim + ROW_BYTES)).view(n, heads, size, dim)
        return (
            keys.permute(1, 0, 3, 2).reshape(heads, n * size, dim),
            values.transpose(0, 1).reshape(heads, n * size, dim),
        )


class Int8Writes:
    """Where the keys and values of a step's tokens go; the same in every layer.

    `fresh` has, for the layer that is being computed, the blocks that the prefill rows of the step have tokens in.
    """

    def __init__(self, inputs: StepInputs, cache: Int8KVCache) -> None:
        self._cache = cache
        size, heads, dim = cache.block_size, cache.num_kv_heads, cache.head_dim
        self.num_decodes = num = inputs.num_decodes
        # Decode rows: each token to its tail, and a block whose last token that is from there to its codes.
        positions = inputs.positions[:num]
        tails, offset = cache.tail_of(inputs.token_slots[:num], positions), positions % size
        self._tail_places = TokenPlaces(tails, offset, heads, dim, size)
        self._begun = torch.from_numpy(tails[offset == 0])
        is_last = (offset == size - 1) & (inputs.token_slots[:num] >= 0)
        self._full = torch.from_numpy(tails[is_last])
        self._full_blocks = torch.from_numpy(inputs.kv_slots[:num][is_last] // size)
        self._add_prefills(inputs)

    def _add_prefills(self, inputs: StepInputs) -> None:
        cache, size = self._cache, self._cache.block_size
        self.first_fresh: list[int] = []
        """By prefill row, the first of its fresh blocks."""
        places, full, full_blocks = [], [], []
        kept: list[tuple[int, int, int]] = []  # tail, fresh block, tokens
        left: list[tuple[int, int]] = []  # tail, fresh block
        total = 0
        columns = zip(
            inputs.prefill_slots, inputs.prefill_first, inputs.prefill_counts, inputs.prefill_tables, strict=True
        )
        for slot, start, count, table in columns:
            low, end = start // size, start + count
            self.first_fresh.append(total)
            places.append(np.arange(start, end) - low * size + total * size)
            # What earlier chunks have of its first block, and what this one leaves of its last.
            if start % size:
                kept.append((int(cache.tail_of(np.array(slot), np.array(start))), total, start % size))
            if end % size:
                left.append((int(cache.tail_of(np.array(slot), np.array(end))), total + end // size - low))
            full.append(np.arange(total, total + end // size - low))
            full_blocks.append(table[low : end // size].astype(np.int64))
            total += -(-end // size) - low
        self.num_fresh = total
        self._kept, self._left = kept, torch.tensor(left, dtype=torch.int64).view(-1, 2)
        if total:
            self._places = torch.from_numpy(np.concatenate(places))
            self._fresh_full = torch.from_numpy(np.concatenate(full))
            self._fresh_blocks = torch.from_numpy(np.concatenate(full_blocks))
            shape = (total, 2 * cache.num_kv_heads, size * cache.head_dim)
            self.fresh = KVLayer(torch.zeros(shape, dtype=cache.dtype), cache.num_kv_heads, cache.head_dim, size)
            """As the tails of a layer."""

    def store(self, layer: int, key_value: torch.Tensor) -> None:
        """key_value: [num_tokens, 2 * num_kv_heads, head_dim]."""
        cache, views = self._cache, self._cache.layers[layer]
        heads, size, dim, tails = cache.num_kv_heads, cache.block_size, cache.head_dim, views.tails
        if self.num_decodes:
            rows = key_value[: self.num_decodes]
            if len(self._begun):
                tails.blocks.index_fill_(0, self._begun, 0)
            self._tail_places.store(tails, rows)
            if len(self._full):
                keys, values = tails.keys.index_select(0, self._full), tails.values.index_select(0, self._full)
                cache.round_(views, keys, values, self._full_blocks)
        if not self.num_fresh:
            return
        tokens = key_value[self.num_decodes : self.num_decodes + len(self._places)]
        placed = tokens.new_zeros(self.num_fresh * size, 2 * heads, dim)
        placed.index_copy_(0, self._places, tokens)
        placed = placed.view(self.num_fresh, size, 2 * heads, dim)
        fresh = self.fresh
        fresh.keys.copy_(placed[:, :, :heads].permute(0, 2, 3, 1))
        fresh.values.copy_(placed[:, :, heads:].transpose(1, 2))
        for tail, block, count in self._kept:
            fresh.keys[block, :, :, :count] = tails.keys[tail, :, :, :count]
            fresh.values[block, :, :count] = tails.values[tail, :, :count]
        if len(self._fresh_full):
            where = self._fresh_full
            cache.round_(
                views, fresh.keys.index_select(0, where), fresh.values.index_select(0, where), self._fresh_blocks
            )
        if len(self._left):
            to, where = self._left.unbind(1)
            tails.blocks.index_copy_(0, to, fresh.blocks.index_select(0, where))


class TailedGroup(RowsOfBlocks):
    """Decode rows [start, end) of a step: what each reads of the blocks before its own, and of its own, in every layer.

    Rows are padded to one number of blocks, with the block of zeros.
    """

    def __init__(
        self, start: int, end: int, num_blocks: int, first_block: I64, fold: int, cache: Int8KVCache, *, is_fresh: bool
    ) -> None:
        """num_blocks: with its own. is_fresh: own blocks are those of `Int8Writes.fresh`, not tails."""
        heads, dim, size, kind = cache.num_kv_heads, cache.head_dim, cache.block_size, cache.index_type
        rows, before = end - start, num_blocks - 1
        self.start, self.end, self.is_fresh = start, end, is_fresh
        self.num_blocks, self.num_before = num_blocks, before
        self.first_block = first_block  # [rows]
        self._heads = heads
        each = np.arange(heads)[:, None]
        self._key_rows = (each * dim + np.arange(dim)).astype(kind)[:, None]  # [num_kv_heads, 1, head_dim] of block 0
        self._value_rows = (each * size + np.arange(size)).astype(kind)[:, None]
        self._own_values = ((each + heads) * size + np.arange(size)).astype(kind)[:, None]
        self._keys = np.empty((rows, heads, fold, before, dim), kind)
        self._values = np.empty((rows, heads, fold, before, size), kind)
        self._own_key_rows = np.empty((rows, heads, fold, dim), kind)
        self._own_value_rows = np.empty((rows, heads, fold, size), kind)
        self.key_index, self.value_index, self.own_keys, self.own_values = (
            torch.from_numpy(index.reshape(-1))
            for index in (self._keys, self._values, self._own_key_rows, self._own_value_rows)
        )
        self.key_bags = torch.from_numpy(np.arange(0, self._keys.size, dim, dtype=kind))
        self.value_bags = torch.from_numpy(np.arange(0, self._values.size, max(1, before * size), dtype=kind))
        self.own_key_bags = torch.from_numpy(np.arange(0, self._own_key_rows.size, dim, dtype=kind))
        self.own_value_bags = torch.from_numpy(np.arange(0, self._own_value_rows.size, size, dtype=kind))
        self.bias = torch.full((rows, 1, num_blocks * size), -torch.inf)
        """float32, 0 where a row may look: first its own block, then those before it."""

    def point_own(self, rows: Any, own: I64) -> None:
        """Let the own blocks of these rows be those: tails, or fresh blocks."""
        blocks = own.astype(self._keys.dtype)[:, None, None, None] * (2 * self._heads)
        dim, size = self._keys.shape[-1], self._values.shape[-1]
        self._own_key_rows[rows] = blocks * dim + self._key_rows
        self._own_value_rows[rows] = blocks * size + self._own_values


class Int8AttentionBatch(AttentionBatch):
    """`AttentionBatch` over rounded blocks and tails."""

    _cache: Int8KVCache  # type: ignore[assignment]
    _writes: Int8Writes  # type: ignore[assignment]
    groups: list[TailedGroup]  # type: ignore[assignment]

    def __init__(
        self, inputs: StepInputs, cache: Int8KVCache, writes: Int8Writes, queries_per_kv: int, window: int | None
    ) -> None:
        self.queries_per_kv, self._cache, self._writes, self._window = queries_per_kv, cache, writes, window
        self.groups = list(self._decode_groups(inputs)) if inputs.num_decodes else []  # type: ignore[arg-type]
        self.spans: list[Span] = []
        columns = zip(
            inputs.prefill_tables,
            inputs.prefill_starts,
            inputs.prefill_counts,
            inputs.prefill_first,
            inputs.num_prompts,
            writes.first_fresh,
            strict=True,
        )
        for table, start, count, first, of_prompt, fresh in columns:
            num_prompt = min(count, max(0, of_prompt - first))
            if num_prompt:
                self.spans.append(Span(table, start, num_prompt, first, fresh, queries_per_kv, window, cache))
            at, most = num_prompt, max(1, self._most_blocks() // max(1, -(-(first + count) // cache.block_size)))
            while at < count:  # output, each token as a decode row
                end = min(count, at + most)
                lengths = np.arange(first + at, first + end, dtype=np.int64) + 1
                own = fresh + (lengths - 1) // cache.block_size - first // cache.block_size
                tables = np.broadcast_to(table, (end - at, len(table)))
                visible = self._visible(lengths)
                self.groups.append(self._tailed(start + at, tables, lengths, *visible, own, is_fresh=True))
                at = end

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, scoring: Scoring | None = None
    ) -> torch.Tensor:
        scoring = scoring or self._cache.scoring
        self._writes.store(layer, key_value)
        if len(self.groups) == 1 and not self.spans and self.groups[0].end - self.groups[0].start == query.shape[0]:
            return self._decode(layer, query, self.groups[0], scoring)
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        for group in self.groups:
            rows = slice(group.start, group.end)
            out[rows] = self._decode(layer, query[rows], group, scoring)
        for span in self.spans:
            span.attend(self._cache.layers[layer], self._writes.fresh, query, scoring, out)
        return out

    def _decode(  # type: ignore[override]
        self, layer: int, query: torch.Tensor, group: TailedGroup, scoring: Scoring
    ) -> torch.Tensor:
        views = self._cache.layers[layer]
        own = self._writes.fresh if group.is_fresh else views.tails
        num_rows, num_heads, dim = query.shape
        before, size = group.num_before, self._cache.block_size
        exact = query.float()
        scaled, scale = (exact * scoring.scale).to(query.dtype), 1.0
        if query.dtype != torch.float16:  # whose products may be too large before they are scaled
            scaled, scale = query, scoring.scale
        weights = scaled.reshape(-1)
        scores = torch.embedding_bag(own.key_rows, group.own_keys, group.own_key_bags, False, 0, False, weights)[0]
        scores = scores.view(num_rows, num_heads, size).float().mul_(scale)
        if before:
            weights = (exact * scoring.scale).unsqueeze(2).expand(-1, -1, before, -1).reshape(-1)
            old = _sums(views.key_rows, group.key_index, group.key_bags, False, 0, False, weights)
            scores = torch.cat((scores, old.view(num_rows, num_heads, before * size)), 2)
        if scoring.softcap is not None:
            scores = capped_(scores, scoring.softcap)
        shares = torch.softmax(scores.add_(group.bias), -1)  # [num_rows, num_heads, num_blocks * block_size]
        weights = shares[..., :size].to(query.dtype).reshape(-1)
        out = torch.embedding_bag(own.value_rows, group.own_values, group.own_value_bags, False, 0, False, weights)[0]
        if before:
            weights = shares[..., size:].reshape(-1)
            old = _sums(views.value_rows, group.value_index, group.value_bags, False, 0, False, weights)
            out = out.float().add_(old)
        out = out.view(num_rows, num_heads, dim)
        if scoring.sinks is not None:
            out = out * share_beside_sinks(scores, scoring.sinks.unsqueeze(1))
        return out.to(query.dtype).view(num_rows, num_heads * dim)

    def _extend(self, group: TailedGroup, inputs: StepInputs) -> bool:  # type: ignore[override]
        size, rows = self._cache.block_size, slice(group.start, group.end)
        positions = inputs.decode_positions[rows]
        column = positions // size - group.first_block
        if int(column.max()) >= group.num_blocks:
            return False
        here = np.arange(len(positions))
        fresh = np.flatnonzero((positions % size == 0) & (positions > 0))  # padding rows stay at 0
        if self._window is not None:
            if fresh.size or (first_seen(positions, self._window) // size > group.first_block).any():
                return False
            if not isinstance(self._window, Chunk):
                self._hide_before(group, positions)
            elif ((positions % self._window == 0) & (positions > 0)).any():
                return False
        elif fresh.size:  # what was the own block of these rows is one of those before
            block_ids = inputs.decode_table[rows][fresh, positions[fresh] // size - 1]
            group.point(fresh, column[fresh] - 1, block_ids)
            by_block = group.bias.view(len(positions), group.num_blocks, size)
            by_block[torch.from_numpy(fresh), torch.from_numpy(column[fresh])] = 0
            by_block[torch.from_numpy(fresh), 0] = -torch.inf
            group.point_own(fresh, self._cache.tail_of(inputs.token_slots[rows][fresh], positions[fresh]))
        group.bias[torch.from_numpy(here), 0, torch.from_numpy(positions % size)] = 0
        return True

    def _hide_before(self, group: TailedGroup, positions: I64) -> None:
        """The window of each row has moved on by one token."""
        assert self._window is not None
        size = self._cache.block_size
        left = positions - self._window  # the newest position that is not seen any more
        rows = np.flatnonzero(left >= group.first_block * size)
        is_own = left[rows] // size == positions[rows] // size
        where = np.where(is_own, left[rows] % size, size + left[rows] - group.first_block[rows] * size)
        group.bias[torch.from_numpy(rows), 0, torch.from_numpy(where)] = -torch.inf

    def _new_group(  # type: ignore[override]
        self, inputs: StepInputs, start: int, end: int, first_block: I64, num_blocks: I64, first_visible: I64
    ) -> TailedGroup:
        rows = slice(start, end)
        lengths = inputs.decode_lengths[rows]
        own = self._cache.tail_of(inputs.token_slots[rows], lengths - 1)
        visible = first_block[rows], num_blocks[rows], first_visible[rows]
        return self._tailed(start, inputs.decode_table[rows], lengths, *visible, own, is_fresh=False)

    def _tailed(
        self,
        start: int,
        table: I32,
        lengths: I64,
        first_block: I64,
        num_blocks: I64,
        first_visible: I64,
        own: I64,
        *,
        is_fresh: bool,
    ) -> TailedGroup:
        """Of the tokens from `start` on, each with a row of the table, [rows, max_blocks]. own: the own block of each."""
        cache, size = self._cache, self._cache.block_size
        longest = int(num_blocks.max())
        end = start + len(lengths)
        group = TailedGroup(start, end, longest, first_block, self.queries_per_kv, cache, is_fresh=is_fresh)
        group.point_own(slice(None), own)
        if longest > 1:
            group.point_tables(table, first_block, num_blocks - 1, cache.zero_block)
        own_start = ((lengths - 1) // size * size)[:, None]
        position = np.concatenate(
            (own_start + np.arange(size), first_block[:, None] * size + np.arange((longest - 1) * size)), 1
        )
        is_own = np.arange(longest * size) < size
        group.hide((position < first_visible[:, None]) | (position >= np.where(is_own, lengths[:, None], own_start)))
        return group


class Span:
    """Tokens of a prompt in one step: they attend in tiles that begin at multiples of FIXED_TILE.

    A tile has all its queries, and keys up to its end; what is not there yet, or not of this step, is zero and hidden. So its
    products have the same shape in every step.
    """

    def __init__(
        self,
        table: I32,
        start: int,
        count: int,
        first: int,
        fresh: int,
        fold: int,
        window: int | None,
        cache: Int8KVCache,
    ) -> None:
        """start: its first token in the step; first: the position of that; fresh: the fresh block that it is in."""
        size = cache.block_size
        self._cache, self._fold = cache, fold
        numbers = range(first // FIXED_TILE, -(-(first + count) // FIXED_TILE))
        # Of the first to the last tile: rounded blocks [low, high), and own ones [own, own + n), of which some are fresh.
        lows = (first_seen(np.array(numbers, np.int64) * FIXED_TILE, window) // size * size).tolist()
        self._low = lows[0] // size
        high = max(self._low, ((numbers[-1] + 1) * FIXED_TILE - 1) // size)
        ids = np.full(high - self._low, cache.zero_block, np.int64)
        known = table[self._low : min(high, (first + count) // size)]
        ids[: len(known)] = known
        self._block_ids = torch.from_numpy(ids)
        self._own = numbers[0] * FIXED_TILE // size
        self._num_own = -(-(numbers[-1] + 1) * FIXED_TILE // size) - self._own
        at = first // size - self._own
        num_fresh = -(-(first + count) // size) - first // size
        self._fresh, self._places = slice(fresh, fresh + num_fresh), slice(at, at + num_fresh)
        num_heads = cache.num_kv_heads * fold
        per_product = len(cache.layers) * num_heads * cache.head_dim * FIXED_TILE
        self._tiles = []
        for number, low in zip(numbers, lows, strict=True):
            begins, ends = number * FIXED_TILE, (number + 1) * FIXED_TILE
            old_end, own_start = max(low, (ends - 1) // size * size), begins // size * size
            query = torch.arange(begins, ends).unsqueeze(1)
            old, own = torch.arange(low, old_end), torch.arange(own_start, ends)
            block = query // size * size
            key = torch.cat((old, own))
            hidden = torch.cat((old >= block, (own < block) | (own > query)), 1)
            if window is not None:
                hidden |= is_before(key, query, window)
            dtype = cache.dtype
            if dtype != torch.float32 and (dtype == torch.float16 or per_product * (ends - low) <= SMALL_TILE_PRODUCTS):
                dtype = torch.float32
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            a, b = max(first, begins), min(first + count, ends)
            old_part = slice(low - self._low * size, old_end - self._low * size)
            own_part = slice(own_start - self._own * size, ends - self._own * size)
            self._tiles.append((start + a - first, start + b - first, a - begins, old_part, own_part, bias))

    def attend(
        self, layer: Int8Layer, fresh: KVLayer, query: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        cache, heads, fold, dim = self._cache, self._cache.num_kv_heads, self._fold, self._cache.head_dim
        old_keys, old_values = cache.rounded(layer, self._block_ids)
        own = query.new_zeros(2, self._num_own, heads, cache.block_size, dim)
        own[0, self._places] = fresh.keys[self._fresh].transpose(2, 3)
        own[1, self._places] = fresh.values[self._fresh]
        own_keys, own_values = own.transpose(1, 2).reshape(2, heads, -1, dim).unbind(0)
        for start, end, before, old_part, own_part, bias in self._tiles:
            q = query.new_zeros(FIXED_TILE, *query.shape[1:])
            q[before : before + end - start] = query[start:end]
            q = q.view(FIXED_TILE, heads, fold, dim).permute(1, 2, 0, 3).reshape(heads, fold * FIXED_TILE, dim)
            k = torch.cat((old_keys[:, old_part].to(bias.dtype), own_keys[:, own_part].to(bias.dtype)), 1)
            v = torch.cat((old_values[:, old_part].to(bias.dtype), own_values[:, own_part].to(bias.dtype)), 1)
            q = q.to(bias.dtype)
            scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scoring.scale)
            if scoring.softcap is not None:
                scores = capped_(scores, scoring.softcap)
            by_head = scores.view(heads, fold, FIXED_TILE, -1).add_(bias)
            # Queries before the first token of the step may see nothing that is there; they are not used.
            attended = torch.bmm(torch.softmax(scores, -1), v).view(heads, fold, FIXED_TILE, dim)
            if scoring.sinks is not None:
                attended.mul_(share_beside_sinks(by_head, scoring.sinks.view(heads, fold, 1, 1)))
            made = attended.permute(2, 0, 1, 3)[before : before + end - start]
            out[start:end].view(-1, heads, fold, dim).copy_(made)
