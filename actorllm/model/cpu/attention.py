"""The paged KV cache of a worker, and attention over it.

Invariants: the pool is finite between steps, because padded positions are read and multiplied by 0. It starts as zeros, and the
runner zeroes at once what a row without finite states or logits has written. Block ids are those of the scheduler,
[0, num_blocks). Two more blocks belong to the pool itself: one stays zero and fills up short block tables, one takes the writes
of padding tokens.

Layout, per layer: [num_blocks + 2, 2 * num_kv_heads, block_size * head_dim]. The first half of a block's heads are keys,
stored as [head_dim, block_size], the second half values, as [block_size, head_dim]. So either product of attention is a
sum of weighted rows of the pool. Scores are the key rows of a block weighted by the query, outputs the value rows
weighted by the probabilities. That is what `torch.embedding_bag` computes, straight from the pages and for all rows of a
batch at once. Batched matrix products would first gather keys and values, and then be slower. A row's sums do not
depend on what else is in the batch. Only rows of very different length are split into groups. The indices of a group
are kept for the next step of the same rows, and change where a row gets a new block.

Prefill works row by row, in tiles of queries, with matrix products over keys and values that the step has just computed.
Where a part of the row is in the cache already, they are gathered. A cache with `keeps_output_apart` attends to output that is
computed once more as decode rows do. In one with `has_fixed_tiles`, size and place of a tile depend on the position only. What a
step lacks of a tile is filled up, so that every product has the same shape in all steps.

`KVCache` is owned by the runner; `KVWrites` and `AttentionBatch` are made from it once per step and passed through the
layers.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.inputs import StepInputs

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

GROUP_OVERHEAD_ELEMENTS = 400_000
"""Key elements that take as long as the fixed cost of one more group: less padding than that is not worth a split."""

MAX_GROUP_INDICES = 8 << 20
"""Key rows that one group reads in a layer; bounds the memory of its indices, which are four bytes each."""

QUERY_TILE = 256
"""Prompt tokens that attend together: skips most of what lies above the diagonal, and keeps the scores in the cache."""

MAX_TILE_SCORES = 4 << 20
"""Scores of one tile; over long contexts, tiles get smaller than QUERY_TILE."""

FIXED_TILE = 64
"""Positions of a fixed tile: long enough for its products, and short enough to be filled up."""

FEW_TOKENS = 4
"""Up to so many are stored by one call, number by number; more are stored faster by rows."""

SMALL_TILE_PRODUCTS = 64 << 20
"""Up to this many multiplications in all layers, float32 beats bfloat16 with a shape oneDNN has not seen (1 ms)."""


class SharedPages(mmap.mmap):
    """Memory of a file, which other processes map as well."""


def shared_pages(path: str) -> Callable[[int], mmap.mmap]:
    """As `zero_pages`, in a file that has no name: the first call gives its beginning, the next one what is behind that.

    Processes that have the file mapped see zeros from here on. It never becomes smaller, since they may read all that there was.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if size := os.fstat(fd).st_size:
            with SharedPages(fd, size) as before:
                before.madvise(mmap.MADV_REMOVE)
    finally:
        os.close(fd)
    start = 0

    def pages(num_bytes: int) -> mmap.mmap:
        nonlocal start
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, max(os.fstat(fd).st_size, start + num_bytes))
            taken = SharedPages(fd, num_bytes, offset=start)
        finally:
            os.close(fd)
        start += -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        ask_for_large_pages(taken)
        return taken

    return pages


def zero_pages(num_bytes: int) -> mmap.mmap:
    """Zeros that take no memory before they are written; `torch.zeros` writes them all.

    Large pages, where the system has them: a first write costs one fault for 2 MiB instead of 512.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_large_pages(pages)
    return pages


def ask_for_large_pages(pages: mmap.mmap) -> None:
    """Where the system has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)


def empty_pages(pages: mmap.mmap) -> None:
    """Let them be zeros that take no memory."""
    pages.madvise(mmap.MADV_REMOVE if isinstance(pages, SharedPages) else mmap.MADV_DONTNEED)


def blocks_in(pages: mmap.mmap, num_layers: int, num_blocks: int) -> NDArray[np.uint8]:
    """Pages whose layers have all blocks one after the other, as [num_layers, num_blocks, bytes of a block in a layer]."""
    return np.frombuffer(pages, np.uint8).reshape(num_layers, num_blocks, -1)


def views_of_block(pages: mmap.mmap, num_layers: int, num_blocks: int, block: int) -> list[memoryview]:
    """Its bytes in each layer, where every layer has all blocks one after the other."""
    layer = len(pages) // num_layers
    size = layer // num_blocks
    whole = memoryview(pages)
    return [whole[start : start + size] for start in range(block * size, len(pages), layer)]


class Chunk(int):
    """A window that does not slide: positions are cut into chunks of this size, and a token sees those of its own before it."""


def first_seen(positions: I64, window: int | None) -> I64:
    """The first position that the tokens at these ones see."""
    if window is None:
        return np.zeros_like(positions)
    if isinstance(window, Chunk):
        return positions - positions % window
    return np.maximum(positions + 1 - window, 0)


class PagedCache(ABC):
    """What a runner and a decoder do with a cache, however it stores keys and values."""

    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    padding_block: int
    dtype: torch.dtype
    """Of the keys and values that it is given, and of what attention returns."""
    first_position: int = 0
    """No token attends to those before it, and only padding is computed there."""

    @abstractmethod
    def release(self) -> None:
        """Let all be zeros that take no memory, as at first."""

    @abstractmethod
    def block_views(self, block: int) -> list[memoryview]:
        """The memory of a full block, in pieces: what it holds is what these bytes are, in a cache of the same shape."""

    @abstractmethod
    def block_regions(self) -> list[NDArray[np.uint8]]:
        """The memory of all blocks, in the order in which it was taken: [num_layers, blocks, bytes] each (`blocks_in`)."""

    @abstractmethod
    def zero(self, block_ids: I32, slots: I32 | None = None) -> None:
        """Clear these blocks, and what else is kept of these slots, [0, num_slots); None: of none."""

    @abstractmethod
    def clear(self, inputs: StepInputs, tokens: I64) -> None:
        """Clear what some decode rows of a step have stored. tokens: which tokens of the step they are."""

    @abstractmethod
    def copy(self, sources: I32, targets: I32) -> None:
        """Copy blocks, all at once: a target that is also a source is read before it is written."""

    @abstractmethod
    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """A step is computed whose prompts other slots share. pairs: (slot, the slot whose prompt it shares)."""

    @abstractmethod
    def attention(
        self, inputs: StepInputs, queries_per_kv: int, windows: Iterable[int | None]
    ) -> dict[int | None, AttentionBatch]:
        """Which token attends to which in a step, by sliding window (None: everything before)."""


class KVCache(PagedCache):
    """Keys and values of every layer, by block, in the type of the model."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        keeps_output_apart: bool = False,
        has_fixed_tiles: bool = False,
        pages: Callable[[int], mmap.mmap] = zero_pages,
    ) -> None:
        """keeps_output_apart, has_fixed_tiles: how rows of prompts attend (see the module). pages: where its memory is from."""
        self.keeps_output_apart, self.has_fixed_tiles = keeps_output_apart, has_fixed_tiles
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.zero_block = num_blocks
        self.padding_block = num_blocks + 1
        shape = (num_layers, num_blocks + 2, 2 * num_kv_heads, block_size * head_dim)
        self._pages = pages(math.prod(shape) * dtype.itemsize)
        self.pool = torch.frombuffer(self._pages, dtype=torch.uint8).view(dtype).view(shape)
        self.layers = [KVLayer(blocks, num_kv_heads, head_dim, block_size) for blocks in self.pool.unbind(0)]
        rows_per_layer = shape[1] * shape[2] * max(head_dim, block_size)
        self.scoring = Scoring(head_dim**-0.5)
        """Of layers without one of their own."""
        self.index_type: Any = np.int32 if rows_per_layer <= np.iinfo(np.int32).max else np.int64
        self.decodes: dict[int | None, DecodeContext] = {}
        """By sliding window."""

    def release(self) -> None:  # what points to them still does
        empty_pages(self._pages)

    def block_views(self, block: int) -> list[memoryview]:
        return views_of_block(self._pages, self.pool.shape[0], self.num_blocks + 2, block)

    def block_regions(self) -> list[NDArray[np.uint8]]:
        return [blocks_in(self._pages, self.pool.shape[0], self.num_blocks + 2)]

    def zero(self, block_ids: I32, slots: I32 | None = None) -> None:
        self.pool.index_fill_(1, torch.from_numpy(block_ids.astype(np.int64)), 0)

    def clear(self, inputs: StepInputs, tokens: I64) -> None:
        kv_slots = inputs.kv_slots[tokens]
        block, offset = torch.from_numpy(kv_slots // self.block_size), torch.from_numpy(kv_slots % self.block_size)
        for layer in self.layers:
            layer.keys[block, :, :, offset] = 0
            layer.values[block, :, offset] = 0

    def copy(self, sources: I32, targets: I32) -> None:
        to, where = torch.from_numpy(targets.astype(np.int64)), torch.from_numpy(sources.astype(np.int64))
        for layer in self.layers:
            layer.blocks.index_copy_(0, to, layer.blocks.index_select(0, where))

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing: plans copy the blocks."""

    def attention(
        self, inputs: StepInputs, queries_per_kv: int, windows: Iterable[int | None]
    ) -> dict[int | None, AttentionBatch]:
        writes = KVWrites(inputs, self)
        return {window: AttentionBatch(inputs, self, writes, queries_per_kv, window) for window in windows}


class KVLayer:
    """Views of one layer's blocks."""

    __slots__ = ("blocks", "elements", "key_rows", "keys", "value_rows", "values")

    def __init__(self, blocks: torch.Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        self.blocks = blocks  # [num_blocks + 2, 2 * num_kv_heads, block_size * head_dim]
        self.elements = blocks.view(-1)
        self.key_rows = blocks.view(-1, block_size)  # row (block * 2 * num_kv_heads + head) * head_dim + dimension
        self.value_rows = blocks.view(-1, head_dim)  # row (block * 2 * num_kv_heads + head) * block_size + offset
        self.keys = blocks[:, :num_kv_heads].view(-1, num_kv_heads, head_dim, block_size)
        self.values = blocks[:, num_kv_heads:].view(-1, num_kv_heads, block_size, head_dim)


class TokenPlaces:
    """Where single tokens go in the blocks of a layer."""

    def __init__(self, blocks: I64, offsets: I64, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        """blocks, offsets: of each token, [num_tokens]."""
        self._heads, self._dim = num_kv_heads, head_dim
        first = (blocks * (2 * num_kv_heads))[:, None] + np.arange(num_kv_heads)  # [num_tokens, num_kv_heads]
        dims = np.arange(head_dim)
        keys = np.add.outer(first * (head_dim * block_size) + offsets[:, None], dims * block_size)
        rows = (first + num_kv_heads) * block_size + offsets[:, None]
        self.elements: torch.Tensor | None = None
        """Of few tokens, [num_tokens * 2 * num_kv_heads * head_dim]: their keys, and their values."""
        if len(blocks) <= FEW_TOKENS:
            both = np.concatenate((keys, np.add.outer(rows * head_dim, dims)), 1)
            self.elements = torch.from_numpy(both.reshape(-1))
        else:
            self._key_elements = torch.from_numpy(keys.reshape(-1))
            self._value_rows = torch.from_numpy(rows.reshape(-1))

    def store(self, views: KVLayer, key_value: torch.Tensor) -> None:
        """key_value: [num_tokens, 2 * num_kv_heads, head_dim]."""
        if self.elements is not None:
            views.elements.put_(self.elements, key_value.reshape(-1))
            return
        heads = self._heads
        views.elements.put_(self._key_elements, key_value[:, :heads].reshape(-1))
        views.value_rows.index_copy_(0, self._value_rows, key_value[:, heads:].reshape(-1, self._dim))


class KVWrites:
    """Where the keys and values of a step's tokens go; the same in every layer.

    Prompt tokens that fill a whole block are written by block, all others one by one.
    """

    def __init__(self, inputs: StepInputs, cache: KVCache) -> None:
        self._cache = cache
        size, heads, dim = cache.block_size, cache.num_kv_heads, cache.head_dim
        whole, block_ids = _whole_blocks(inputs, size) if inputs.prefill_slots else _NO_BLOCKS
        self._loose: torch.Tensor | None = None  # tokens that are written one by one; None: all
        kv_slots = inputs.kv_slots
        self._whole: torch.Tensor | None = None  # [num_whole * block_size] tokens
        if block_ids.size:
            is_loose = np.ones(len(kv_slots), np.bool_)
            is_loose[whole] = False
            loose = np.flatnonzero(is_loose)
            kv_slots = kv_slots[loose]
            self._loose = torch.from_numpy(loose)
            self._whole, self._block_ids = torch.from_numpy(whole), torch.from_numpy(block_ids)
        self.places = TokenPlaces(kv_slots // size, kv_slots % size, heads, dim, size)
        # Of few tokens, none of them with a whole block: where all that is written goes.
        self._elements = None if block_ids.size else self.places.elements

    def store(self, layer: int, key_value: torch.Tensor) -> None:
        """key_value: [num_tokens, 2 * num_kv_heads, head_dim]."""
        views, heads = self._cache.layers[layer], self._cache.num_kv_heads
        if self._elements is not None:
            views.elements.put_(self._elements, key_value.reshape(-1))
            return
        loose = key_value
        if self._whole is not None:
            assert self._loose is not None
            whole = key_value.index_select(0, self._whole).view(-1, self._cache.block_size, *key_value.shape[1:])
            # [num_whole, block_size, 2 * num_kv_heads, head_dim]
            views.keys.index_copy_(0, self._block_ids, whole[:, :, :heads].permute(0, 2, 3, 1).contiguous())
            views.values.index_copy_(0, self._block_ids, whole[:, :, heads:].transpose(1, 2).contiguous())
            if not len(self._loose):
                return
            loose = key_value.index_select(0, self._loose)
        self.places.store(views, loose)


def _whole_blocks(inputs: StepInputs, size: int) -> tuple[I64, I64]:
    """The prompt tokens that fill whole blocks, [num_whole * size], and these blocks."""
    tokens, blocks = [], []
    for start, count, first, table in zip(
        inputs.prefill_starts, inputs.prefill_counts, inputs.prefill_first, inputs.prefill_tables, strict=True
    ):
        low, high = -(-first // size), (first + count) // size
        if low < high:
            tokens.append(np.arange(start + low * size - first, start + high * size - first))
            blocks.append(table[low:high].astype(np.int64))
    if not blocks:
        return _NO_BLOCKS
    return np.concatenate(tokens), np.concatenate(blocks)


_NO_BLOCKS: tuple[I64, I64] = np.zeros(0, np.int64), np.zeros(0, np.int64)


class RowsOfBlocks:
    """What some rows of a step read of the blocks in their tables, padded to one number of blocks."""

    _heads: int
    """Of keys, and of values, that a block has in the array that is read."""
    _keys: NDArray[Any]  # [rows, num_kv_heads, fold, num_blocks, head_dim]
    _values: NDArray[Any]  # [rows, num_kv_heads, fold, num_blocks, block_size]
    _key_rows: NDArray[Any]
    _value_rows: NDArray[Any]
    bias: torch.Tensor

    def point(self, rows: Any, columns: Any, block_ids: I32) -> None:
        """Let some entries of the rows' tables be these blocks; indexed like an array of [rows, num_blocks]."""
        blocks = block_ids.astype(self._keys.dtype)[..., None, None, None] * self._heads
        dim, size = self._keys.shape[-1], self._values.shape[-1]
        self._keys.transpose(0, 3, 1, 2, 4)[rows, columns] = blocks * dim + self._key_rows
        self._values.transpose(0, 3, 1, 2, 4)[rows, columns] = blocks * size + self._value_rows

    def point_tables(self, table: I32, first_block: I64, num_blocks: I64, zero_block: int) -> None:
        """Let each row read so many blocks of its row of the table, and behind them the block of zeros."""
        columns = np.arange(int(num_blocks.max()))
        where = np.minimum(first_block[:, None] + columns, table.shape[1] - 1)
        block_ids = np.take_along_axis(table, where, 1)  # [rows, most blocks]
        block_ids[columns >= num_blocks[:, None]] = zero_block
        self.point(slice(None), slice(None), block_ids)

    def hide(self, hidden: NDArray[np.bool_]) -> None:
        """Let no row look at its entries of these positions, [rows, positions], and at all others."""
        self.bias.view(len(hidden), -1).zero_().masked_fill_(torch.from_numpy(hidden), -torch.inf)


class DecodeGroup(RowsOfBlocks):
    """Decode rows [start, end) of a step, padded to one number of blocks: what each of them reads, in every layer.

    `first_block` is where the table of each row begins, which is 0 unless a sliding window has left blocks behind.
    """

    def __init__(
        self, start: int, positions: I64, num_blocks: int, first_block: I64, fold: int, cache: KVCache
    ) -> None:
        heads, dim, size, kind = cache.num_kv_heads, cache.head_dim, cache.block_size, cache.index_type
        rows = len(positions)
        self.start, self.end = start, start + rows
        self.num_blocks = num_blocks
        self.first_block = first_block  # [rows]
        self.positions = positions  # [rows], of their tokens
        self._heads = 2 * heads
        keys, values = np.arange(heads)[:, None], np.arange(heads, 2 * heads)[:, None]
        self._key_rows = (keys * dim + np.arange(dim)).astype(kind)[:, None]  # [num_kv_heads, 1, head_dim] of block 0
        self._value_rows = (values * size + np.arange(size)).astype(kind)[:, None]  # [num_kv_heads, 1, block_size]
        self._keys = np.empty((rows, heads, fold, num_blocks, dim), kind)
        self._values = np.empty((rows, heads, fold, num_blocks, size), kind)
        self.key_index = torch.from_numpy(self._keys.reshape(-1))
        self.value_index = torch.from_numpy(self._values.reshape(-1))
        self.key_bags = torch.from_numpy(np.arange(0, self._keys.size, dim, dtype=kind))
        self.value_bags = torch.from_numpy(np.arange(0, self._values.size, num_blocks * size, dtype=kind))
        self.bias = torch.empty(rows, 1, num_blocks * size, dtype=cache.dtype)
        """0 where a row may look, -inf elsewhere."""


@dataclass(slots=True)
class DecodeContext:
    """The groups of the decode rows of a step, as long as the rows stay what they are."""

    version: int
    lengths: I64  # [num_decodes]
    groups: list[DecodeGroup]


@dataclass(slots=True)
class PrefillTile:
    """Tokens [start, end) of a step, of one row, and the part [first, last) of the row's keys they look at."""

    start: int
    end: int
    first: int
    last: int
    bias: torch.Tensor
    """[end - start, keys], or by head [num_kv_heads, 1, end - start, keys]: what is added to scores, -inf to hide, for the last
    `keys` of them; they look at all before those."""
    is_small: bool
    """Computed in float32 although the model is bfloat16 or float16."""
    num_before: int = 0
    """Queries of a fixed tile that are not of this step, before those that are."""
    num_queries: int | None = None
    """Of a fixed tile; None: end - start."""


@dataclass(slots=True)
class PrefillRow:
    """The tokens [start, end) of one prefill row, with the blocks of its context."""

    start: int
    end: int
    block_ids: torch.Tensor | None  # [blocks_per_row]; None: all its keys are those of this step
    tiles: list[PrefillTile]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer makes weights of products, where it differs from softmax(product * head_dim ** -0.5)."""

    scale: float
    softcap: float | None = None
    """Scaled products x become softcap * tanh(x / softcap) (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """[num_heads]: a score of each head that takes part in the softmax and has no value (gpt-oss)."""
    by_position: torch.Tensor | None = None
    """float32 [num_heads, positions]: what is added to the scores of a key, by its position (ALiBi, arXiv:2108.12409). For layers
    without a window."""


class AttentionBatch:
    """Which token attends to which in one step, for one sliding window (None: everything before)."""

    def __init__(
        self, inputs: StepInputs, cache: KVCache, writes: KVWrites, queries_per_kv: int, window: int | None
    ) -> None:
        self.queries_per_kv = queries_per_kv
        self._cache = cache
        self._writes = writes
        self._window = window
        self.groups = list(self._decode_groups(inputs)) if inputs.num_decodes else []
        self.rows: list[PrefillRow] = []
        self._has_fresh_rows = False
        for index, (start, count, first) in enumerate(
            zip(inputs.prefill_starts, inputs.prefill_counts, inputs.prefill_first, strict=True)
        ):
            num_prompt = count
            if cache.keeps_output_apart:
                num_prompt = min(count, max(0, inputs.num_prompts[index] - first))
                self.groups += self._output_groups(inputs.prefill_tables[index], start, first, num_prompt, count)
            if num_prompt:
                table = inputs.prefill_tables[index]
                whole = None if inputs.whole is None else inputs.whole[start : start + num_prompt]
                if cache.has_fixed_tiles and whole is None:
                    row = self._fixed_row(table, start, num_prompt, first)
                else:
                    row = self._prefill_row(table, start, num_prompt, first, whole)
                self.rows.append(row)
                self._has_fresh_rows |= row.block_ids is None

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, scoring: Scoring | None = None
    ) -> torch.Tensor:
        """Store this step's keys and values, then attend.

        query: [num_tokens, num_heads, head_dim]; key_value: [num_tokens, 2 * num_kv_heads, head_dim].
        Returns [num_tokens, num_heads * head_dim].
        """
        scoring = scoring or self._cache.scoring
        self._writes.store(layer, key_value)
        fresh = key_value.transpose(0, 1).contiguous() if self._has_fresh_rows else None
        return self._attended(layer, query, fresh, scoring)

    def _attended(self, layer: int, query: torch.Tensor, fresh: torch.Tensor | None, scoring: Scoring) -> torch.Tensor:
        """fresh: this step's keys and values, [2 * num_kv_heads, num_tokens, head_dim], where a row sees no others."""
        if len(self.groups) == 1 and not self.rows and self.groups[0].end - self.groups[0].start == query.shape[0]:
            return self._decode(layer, query, self.groups[0], scoring)
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        for group in self.groups:
            rows = slice(group.start, group.end)
            out[rows] = self._decode(layer, query[rows], group, scoring)
        for row in self.rows:
            self._prefill(layer, query, fresh, row, scoring, out)
        return out

    def _decode(self, layer: int, query: torch.Tensor, group: DecodeGroup, scoring: Scoring) -> torch.Tensor:
        views = self._cache.layers[layer]
        num_rows, num_heads, dim = query.shape
        scale = scoring.scale
        if query.dtype == torch.float16:  # products that are not scaled yet may be larger than float16 can hold
            query, scale = query * scale, 1.0
        weights = query.unsqueeze(2).expand(-1, -1, group.num_blocks, -1).reshape(-1)
        # One sum of weighted rows per bag; a bag is the part of the index from its entry in the bags on.
        scores = torch.embedding_bag(views.key_rows, group.key_index, group.key_bags, False, 0, False, weights)[0]
        scores = scores.view(num_rows, num_heads, -1)
        if scoring.softcap is None:
            scores = torch.add(group.bias, scores, alpha=scale)
        else:
            scores = capped_(scores.mul_(scale), scoring.softcap).add_(group.bias)
        if scoring.by_position is not None:
            own = scoring.by_position[:, torch.from_numpy(group.positions)].T.unsqueeze(2)  # [rows, num_heads, 1]
            scores = placed(scores, scoring.by_position[:, : scores.shape[-1]], own)
        weights = torch.softmax(scores, -1).to(query.dtype).view(-1)  # [num_rows, num_heads, num_blocks * block_size]
        out = torch.embedding_bag(views.value_rows, group.value_index, group.value_bags, False, 0, False, weights)[0]
        out = out.view(num_rows, num_heads, dim)
        if scoring.sinks is not None:
            out.mul_(share_beside_sinks(scores, scoring.sinks.unsqueeze(1)))
        return out.view(num_rows, num_heads * dim)

    def _prefill(
        self,
        layer: int,
        query: torch.Tensor,
        fresh: torch.Tensor | None,
        row: PrefillRow,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        heads, dim, fold = self._cache.num_kv_heads, self._cache.head_dim, self.queries_per_kv
        if row.block_ids is None:
            assert fresh is not None
            key, value = fresh[:heads, row.start : row.end], fresh[heads:, row.start : row.end]
        else:
            blocks = self._cache.layers[layer].blocks.index_select(0, row.block_ids)
            size = self._cache.block_size
            # [blocks_per_row, num_kv_heads, head_dim, block_size]: in the order in which runs stay contiguous
            key = blocks[:, :heads].view(-1, heads, dim, size).permute(1, 2, 0, 3).reshape(heads, dim, -1)
            key = key.transpose(1, 2)
            value = blocks[:, heads:].transpose(0, 1).reshape(heads, -1, dim)
        # both [num_kv_heads, length, head_dim]
        for tile in row.tiles:
            num_tokens, length = tile.end - tile.start, tile.last - tile.first
            q = query[tile.start : tile.end]
            if tile.num_queries is not None:
                num_tokens = tile.num_queries
                filled = q.new_zeros(num_tokens, *q.shape[1:])
                filled[tile.num_before : tile.num_before + len(q)] = q
                q = filled
            q = q.view(num_tokens, heads, fold, dim)
            q = q.permute(1, 2, 0, 3).reshape(heads, fold * num_tokens, dim)
            k, v = key[:, tile.first : tile.last], value[:, tile.first : tile.last]
            if tile.num_queries is not None:
                k, v = k.contiguous(), v.contiguous()
            if tile.is_small:
                q, k, v = q.float(), k.float(), v.float()
            scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scoring.scale)
            if scoring.softcap is not None:
                scores = capped_(scores, scoring.softcap)
            by_head = scores.view(heads, fold, num_tokens, length)
            by_head[..., -tile.bias.shape[-1] :].add_(tile.bias)
            if scoring.by_position is not None:
                places = scoring.by_position.view(heads, fold, 1, -1)
                last = torch.arange(tile.last - num_tokens, tile.last).clamp_max_(places.shape[-1] - 1)
                own = places[..., last].transpose(2, 3)  # [num_kv_heads, fold, num_tokens, 1]
                by_head = placed(by_head, places[..., tile.first : tile.last], own)
                scores = by_head.view_as(scores)
            attended = torch.bmm(torch.softmax(scores, -1).to(v.dtype), v).view(heads, fold, num_tokens, dim)
            if scoring.sinks is not None:
                attended.mul_(share_beside_sinks(by_head, scoring.sinks.view(heads, fold, 1, 1)))
            made = attended.permute(2, 0, 1, 3)  # [num_tokens, num_kv_heads, fold, head_dim]
            if tile.num_queries is not None:
                made = made[tile.num_before : tile.num_before + tile.end - tile.start]
            out[tile.start : tile.end].view(-1, heads, fold, dim).copy_(made)

    def _decode_groups(self, inputs: StepInputs) -> list[DecodeGroup]:
        """The groups of the step before with one more token per row, or new ones."""
        context, lengths = self._cache.decodes.get(self._window), inputs.decode_lengths
        if (
            context is not None
            and context.version == inputs.decode_version
            and _is_one_step_on(context.lengths, lengths)
        ):
            for group in context.groups:
                if not self._extend(group, inputs):
                    break
            else:
                context.lengths = lengths
                return context.groups
        context = self._cache.decodes[self._window] = DecodeContext(
            inputs.decode_version, lengths, self._new_groups(inputs)
        )
        return context.groups

    def _extend(self, group: DecodeGroup, inputs: StepInputs) -> bool:
        """One more token per row: where it is, and that it may be looked at. False: the group must be made anew."""
        size, rows = self._cache.block_size, slice(group.start, group.end)
        positions = inputs.decode_positions[rows]
        column = positions // size - group.first_block
        if int(column.max()) >= group.num_blocks:
            return False
        here = np.arange(len(positions))
        if self._window is not None:
            if (first_seen(positions, self._window) // size > group.first_block).any():
                return False  # a block has left the window
            if isinstance(self._window, Chunk) and ((positions % self._window == 0) & (positions > 0)).any():
                return False  # a chunk begins, maybe within a block
            hidden = positions - self._window - group.first_block * size
            left = np.flatnonzero(hidden >= 0)
            group.bias[torch.from_numpy(left), 0, torch.from_numpy(hidden[left])] = -torch.inf
        group.positions = positions
        group.bias[torch.from_numpy(here), 0, torch.from_numpy(positions - group.first_block * size)] = 0
        fresh = np.flatnonzero((positions % size == 0) & (positions > 0))  # padding rows stay at 0
        if fresh.size:
            block_ids = inputs.decode_table[rows][fresh, positions[fresh] // size]
            group.point(fresh, column[fresh], block_ids)
        return True

    def _new_groups(self, inputs: StepInputs) -> list[DecodeGroup]:
        """Rows come ordered by falling length whenever their lengths differ enough for a split to pay."""
        cache, size = self._cache, self._cache.block_size
        lengths = inputs.decode_lengths
        first_block, num_blocks, first_visible = self._visible(lengths)
        block_elements = cache.num_kv_heads * cache.head_dim * size
        most_blocks = self._most_blocks()
        groups = []
        start, total = 0, len(lengths)
        while start < total:
            longest = int(num_blocks[start:].max())
            end = total
            if inputs.is_sorted:
                saved = (total - np.arange(start, total)) * (longest - num_blocks[start:]) * block_elements
                worth = np.flatnonzero(saved > GROUP_OVERHEAD_ELEMENTS)
                end = start + max(1, int(worth[0])) if worth.size else total
            end = min(end, start + max(1, most_blocks // longest))
            groups.append(self._new_group(inputs, start, end, first_block, num_blocks, first_visible))
            start = end
        return groups

    def _new_group(
        self, inputs: StepInputs, start: int, end: int, first_block: I64, num_blocks: I64, first_visible: I64
    ) -> DecodeGroup:
        rows = slice(start, end)
        return self._group(
            start,
            inputs.decode_table[rows],
            inputs.decode_lengths[rows],
            first_block[rows],
            num_blocks[rows],
            first_visible[rows],
        )

    def _group(
        self,
        start: int,
        table: I32,
        lengths: I64,
        first_block: I64,
        num_blocks: I64,
        first_visible: I64,
    ) -> DecodeGroup:
        """Of the tokens from `start` on, each with a row of the table, [rows, max_blocks]."""
        cache, size = self._cache, self._cache.block_size
        longest = int(num_blocks.max())
        group = DecodeGroup(start, lengths - 1, longest, first_block, self.queries_per_kv, cache)
        group.point_tables(table, first_block, num_blocks, cache.zero_block)
        position = np.arange(longest * size) + first_block[:, None] * size
        group.hide((position >= lengths[:, None]) | (position < first_visible[:, None]))
        return group

    def _most_blocks(self) -> int:
        """That the rows of one group may have together."""
        cache = self._cache
        return max(1, MAX_GROUP_INDICES // (cache.num_kv_heads * self.queries_per_kv * cache.head_dim))

    def _visible(self, lengths: I64) -> tuple[I64, I64, I64]:
        """Of rows of these lengths: the first block, the number of blocks, and the first position that each sees."""
        size = self._cache.block_size
        if self._window is None:
            first_visible = np.minimum(lengths - 1, self._cache.first_position)
        else:
            first_visible = first_seen(lengths - 1, self._window)
        first_block = first_visible // size
        return first_block, -(-lengths // size) - first_block, first_visible

    def _output_groups(self, table: I32, start: int, first: int, num_prompt: int, count: int) -> list[DecodeGroup]:
        """Tokens [start + num_prompt, start + count) of a prefill row, each as a decode row. first: position of the row's first."""
        groups = []
        at, step = num_prompt, max(1, self._most_blocks() // max(1, -(-(first + count) // self._cache.block_size)))
        while at < count:
            end = min(count, at + step)
            lengths = np.arange(first + at, first + end, dtype=np.int64) + 1
            tables = np.broadcast_to(table, (end - at, len(table)))
            groups.append(self._group(start + at, tables, lengths, *self._visible(lengths)))
            at = end
        return groups

    def _fixed_row(self, table: I32, start: int, count: int, first_position: int) -> PrefillRow:
        """As `_prefill_row`, with tiles that begin at multiples of FIXED_TILE and see all keys up to their end."""
        cache, size, window = self._cache, self._cache.block_size, self._window
        numbers = range(first_position // FIXED_TILE, -(-(first_position + count) // FIXED_TILE))
        lows = (first_seen(np.array(numbers, np.int64) * FIXED_TILE, window) // size * size).tolist()
        first_block, num_blocks = lows[0] // size, -(-(numbers[-1] + 1) * FIXED_TILE // size)
        ids = np.full(num_blocks - first_block, cache.zero_block, np.int64)
        known = table[first_block : min(num_blocks, -(-(first_position + count) // size))]
        ids[: len(known)] = known
        num_heads, dim = cache.num_kv_heads * self.queries_per_kv, cache.head_dim
        per_product = len(cache.layers) * num_heads * dim * FIXED_TILE
        offset = first_block * size
        tiles = []
        for number, low in zip(numbers, lows, strict=True):
            begins, high = number * FIXED_TILE, (number + 1) * FIXED_TILE
            a, b = max(first_position, begins), min(first_position + count, high)
            is_small = cache.dtype == torch.float16 or (
                cache.dtype != torch.float32 and per_product * (high - low) <= SMALL_TILE_PRODUCTS
            )
            query, key = torch.arange(begins, high).unsqueeze(1), torch.arange(low, high)
            hidden = key > query
            if window is not None:
                hidden |= is_before(key, query, window)
            bias = torch.zeros(hidden.shape, dtype=torch.float32 if is_small else cache.dtype)
            bias.masked_fill_(hidden, float("-inf"))
            tiles.append(
                PrefillTile(
                    start + a - first_position,
                    start + b - first_position,
                    low - offset,
                    high - offset,
                    bias,
                    is_small,
                    num_before=a - begins,
                    num_queries=FIXED_TILE,
                )
            )
        return PrefillRow(start, start + count, torch.from_numpy(ids), tiles)

    def _prefill_row(
        self, table: I32, start: int, count: int, first_position: int, whole: NDArray[np.bool_] | None
    ) -> PrefillRow:
        """Tiles of one row; the gathered context starts at the first block that any of its tokens sees.

        whole: which tokens see the item that they are of as a whole; None: none does.
        """
        size, window = self._cache.block_size, self._window
        length = first_position + count
        oldest = first_seen(np.arange(first_position, first_position + count), window)
        first_block = oldest.item(0) // size
        offset = first_block * size
        ids = torch.from_numpy(table[first_block : -(-length // size)]) if first_position else None
        num_heads, dim = self._cache.num_kv_heads * self.queries_per_kv, self._cache.head_dim
        layer_products = len(self._cache.layers) * num_heads * dim
        is_exact = self._cache.dtype == torch.float32
        is_float16 = self._cache.dtype == torch.float16  # few processors multiply it fast
        tile_size = max(16, min(QUERY_TILE, MAX_TILE_SCORES // (num_heads * length)))
        last_visible = np.arange(first_position, length)
        if whole is not None:
            last_visible += _behind_in_run(whole)
        tiles = []
        for a in range(0, count, tile_size):
            b = min(count, a + tile_size)
            low = self._cache.first_position if window is None else max(offset, oldest.item(a))
            high = int(last_visible[a:b].max()) + 1
            num_products = layer_products * (b - a) * (high - low)
            is_small = is_float16 or (not is_exact and num_products <= SMALL_TILE_PRODUCTS)
            query = torch.arange(first_position + a, first_position + b).unsqueeze(1)
            key = torch.arange(low if window is not None else first_position + a, high)
            hidden = key > torch.from_numpy(last_visible[a:b]).unsqueeze(1)
            if window is not None:
                hidden |= is_before(key, query, window)
            dtype = torch.float32 if is_small else self._cache.dtype
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            tiles.append(PrefillTile(start + a, start + b, low - offset, high - offset, bias, is_small))
        return PrefillRow(start, start + count, ids, tiles)


def _behind_in_run(is_member: NDArray[np.bool_]) -> I64:
    """Of each member how many there are behind it up to the end of its run; 0 for others."""
    others = np.flatnonzero(np.append(~is_member, True))
    here = np.arange(is_member.size)
    ends = others[np.searchsorted(others, here)]
    return np.where(is_member, ends - 1 - here, 0)


def _is_one_step_on(before: I64, after: I64) -> bool:
    """Whether every row has one token more than before; rows of the padding slot stay at their only one."""
    grown = after - before
    return bool(((grown == 1) | ((grown == 0) & (after == 1))).all())


def is_before(key: torch.Tensor, query: torch.Tensor, window: int) -> torch.Tensor:
    """Which keys no longer are in the windows of queries; both by position."""
    return key < query - query % window if isinstance(window, Chunk) else key <= query - window


def capped_(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap)


def placed(scores: torch.Tensor, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Scores with those of the positions of keys added, in float32.

    Arguments:
        scores: [..., num_keys]; those of the last keys, which are hidden, may stay as they are.
        keys: what is added, [..., num_keys or fewer].
        own: the same of the position of the query, [..., 1], which is taken off: no softmax depends on it, and sums stay small.
    """
    exact = scores.float()
    exact[..., : keys.shape[-1]].add_(keys - own)
    return exact


def share_beside_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What a softmax with one more score would leave for the others, [..., 1]; sinks broadcast to that."""
    return torch.sigmoid(torch.logsumexp(scores.float(), -1, True) - sinks.float()).to(scores.dtype)
