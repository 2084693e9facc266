"""Attention over latents: what the cache holds of a token is one vector for all heads (DeepSeek-V2, arXiv:2405.04434).

A token has a latent, and a part that is rotated. Both are in the cache, `LatentShape.width` numbers a layer. A key of a head is a
product of the latent, with the rotated part behind it. A value is another product of the latent.

What is computed depends on the kind of row, and never on what else is in the step. Decode rows attend to latents as they are
(absorbed). The products that make keys and values are made on the query and on the result. So the cache is read once for all heads.
Rows of prompts attend to keys and values of every head (expanded), which takes fewer operations where many tokens attend. They are
expanded for as many heads at a time as fit into `MAX_EXPANDED` numbers.

Decode attention is computed in float32. Rows of similar length are one group, as in `attention`. One index gathers the blocks of a
group in all layers. It is kept for the next step of the same rows.

Layout, per layer: [num_blocks + 2, block_size, width]. The two more blocks are as in `attention.KVCache`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.config import EngineConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu.attention import (
    AttentionBatch,
    DecodeContext,
    PagedCache,
    PrefillRow,
    PrefillTile,
    RowsOfBlocks,
    Scoring,
    blocks_in,
    empty_pages,
    views_of_block,
    zero_pages,
)
from actorllm.model.cpu.layers import RMSNorm
from actorllm.model.families.decoder_config import DecoderConfig, LatentShape
from actorllm.model.families.tensors import LatentTensors
from actorllm.model.inputs import StepInputs
from actorllm.model.linear import Linear, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.parallel import HeadShare
from actorllm.types.quantization import INT8

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

MAX_EXPANDED = 32 << 20
"""Numbers of keys and values that a prompt's row has expanded at a time; one head of a longer row has more."""

MAX_GATHERED = 1 << 20
"""Numbers of latents that the rows of one group gather in a layer, so that these stay in the processor's cache. A long row has
more."""


def check_latent(config: EngineConfig) -> None:
    """Raises UnsupportedModelError for what latents are not made for, which the forward of transformers may be."""
    told = {
        "kv_cache_dtype='int8'": config.cache.dtype == INT8,
        "enable_lora=True": config.lora is not None,
        "batch_invariant=True": config.batch_invariant,
    }
    fix = {"batch_invariant=True": "leave it out"}
    for name, is_wanted in told.items():
        if is_wanted:
            raise UnsupportedModelError(
                f"{name} is not supported with the latent attention of {config.model.architecture} yet; "
                f"{fix.get(name, 'leave it out, or set model_impl=' + repr('transformers'))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentScoring(Scoring):
    """With the products of a layer, float32: of a latent to what is not rotated of the keys, and to the values."""

    keys: torch.Tensor  # [num_heads, plain_dim, rank]
    values: torch.Tensor  # [num_heads, value_dim, rank]


class LatentAttention:
    """Attention of one layer, from its first product to what its last one reads."""

    def __init__(
        self, config: DecoderConfig, tensors: LatentTensors, share: HeadShare, make: Callable[[LinearWeight], Linear]
    ) -> None:
        """make: makes the products."""
        shape = config.latent
        assert shape is not None
        self._shape, self._num_heads = shape, share.num_heads
        self.query_norm: RMSNorm | None = None
        self.query_up: Linear | None = None
        if tensors.query_norm is not None and tensors.query_up is not None:
            self.query_norm, self.query_up = RMSNorm(tensors.query_norm, shape.eps), make(tensors.query_up)
        self.norm = RMSNorm(tensors.norm, shape.eps)
        up = _numbers(tensors.up, make, tensors.norm.dtype).float().view(share.num_heads, -1, shape.rank)
        keys, values = (part.contiguous() for part in torch.split(up, [shape.plain_dim, shape.value_dim], 1))
        scale = config.attention_scale or config.head_dim**-0.5
        self.scoring = LatentScoring(scale, keys=keys, values=values)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one row reads."""
        of_query = 0 if self.query_up is None else self.query_up.num_bytes
        return of_query + 4 * (self.scoring.keys.numel() + self.scoring.values.numel())

    def __call__(
        self, layer: int, made: torch.Tensor, rotations: torch.Tensor, attention: AttentionBatch
    ) -> torch.Tensor:
        """made: [num_tokens, ...] of the first product. rotations: [num_tokens, 1, rotary_dim / 2].

        Returns [num_tokens, num_heads * value_dim].
        """
        shape, num_tokens = self._shape, made.shape[0]
        sizes = [made.shape[1] - shape.width, shape.rank, shape.rotary_dim]
        query, latent, rotary = torch.split(made, sizes, 1)
        if self.query_norm is not None and self.query_up is not None:
            query = self.query_up(self.query_norm(query))
        query = query.reshape(num_tokens, self._num_heads, -1)  # [num_tokens, num_heads, plain_dim + rotary_dim]
        turned = torch.cat((query[..., shape.plain_dim :], rotary.unsqueeze(1)), 1).float()
        torch.view_as_complex(turned.view(num_tokens, self._num_heads + 1, -1, 2)).mul_(rotations)
        turned = turned.to(made.dtype)
        query = torch.cat((query[..., : shape.plain_dim], turned[:, :-1]), 2)
        token = torch.cat((self.norm(latent), turned[:, -1]), 1)
        return attention.attend(layer, query, token.unsqueeze(1), self.scoring)


def _numbers(weight: LinearWeight, make: Callable[[LinearWeight], Linear], dtype: torch.dtype) -> torch.Tensor:
    """A weight of any form as plain numbers, [out_features, in_features]."""
    if isinstance(weight, Dense):
        return weight.weight
    return make(weight)(torch.eye(weight.in_features, dtype=dtype)).T


def working_bytes(shape: LatentShape, num_heads: int, length: int) -> int:
    """Memory for one layer of a row of so many tokens: what is gathered, and what is expanded of it at a time, in two types."""
    per_head = length * (shape.plain_dim + shape.rotary_dim + shape.value_dim)
    expanded = min(per_head * num_heads, max(per_head, MAX_EXPANDED))
    return 8 * (length * shape.width + expanded)


class LatentCache(PagedCache):
    """Latents and rotated parts of every layer, by block."""

    keeps_output_apart: bool
    has_fixed_tiles = False

    def __init__(
        self,
        num_layers: int,
        shape: LatentShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        keeps_output_apart: bool = False,
        pages: Callable[[int], mmap.mmap] = zero_pages,
    ) -> None:
        """keeps_output_apart: output that is computed once more attends as decode rows do. pages: where its memory is from."""
        self.shape, self.dtype, self.keeps_output_apart = shape, dtype, keeps_output_apart
        self.num_kv_heads, self.head_dim = 1, shape.width
        self.num_blocks, self.block_size = num_blocks, block_size
        self.zero_block, self.padding_block = num_blocks, num_blocks + 1
        sizes = (num_layers, num_blocks + 2, block_size, shape.width)
        self._pages = pages(math.prod(sizes) * dtype.itemsize)
        self.pool = torch.frombuffer(self._pages, dtype=torch.uint8).view(dtype).view(sizes)
        self.layers = list(self.pool.unbind(0))
        self.rows = [layer.view(-1, shape.width) for layer in self.layers]
        """Of each layer, by block_size * block + offset."""
        self.scoring = Scoring(shape.width**-0.5)
        self.decodes: dict[int | None, DecodeContext] = {}

    def release(self) -> None:  # what points to them still does
        empty_pages(self._pages)

    def block_views(self, block: int) -> list[memoryview]:
        return views_of_block(self._pages, len(self.layers), self.num_blocks + 2, block)

    def block_regions(self) -> list[NDArray[np.uint8]]:
        return [blocks_in(self._pages, len(self.layers), self.num_blocks + 2)]

    def zero(self, block_ids: I32, slots: I32 | None = None) -> None:
        self.pool.index_fill_(1, torch.from_numpy(block_ids.astype(np.int64)), 0)

    def clear(self, inputs: StepInputs, tokens: I64) -> None:
        where = torch.from_numpy(inputs.kv_slots[tokens])
        for rows in self.rows:
            rows.index_fill_(0, where, 0)

    def copy(self, sources: I32, targets: I32) -> None:
        to, where = torch.from_numpy(targets.astype(np.int64)), torch.from_numpy(sources.astype(np.int64))
        for layer in self.layers:
            layer.index_copy_(0, to, layer.index_select(0, where))

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing: plans copy the blocks."""

    def attention(
        self, inputs: StepInputs, queries_per_kv: int, windows: Iterable[int | None]
    ) -> dict[int | None, AttentionBatch]:
        writes = LatentWrites(inputs, self)
        return {window: LatentBatch(inputs, self, writes, queries_per_kv, window) for window in windows}


class LatentWrites:
    """Where the tokens of a step go; the same in every layer."""

    def __init__(self, inputs: StepInputs, cache: LatentCache) -> None:
        self._cache, self._rows = cache, torch.from_numpy(inputs.kv_slots)

    def store(self, layer: int, tokens: torch.Tensor) -> None:
        """tokens: [num_tokens, width]."""
        self._cache.rows[layer].index_copy_(0, self._rows, tokens)


class LatentGroup(RowsOfBlocks):
    """Decode rows [start, end) of a step, padded to one number of blocks: what each of them reads, in every layer."""

    def __init__(self, start: int, end: int, num_blocks: int, first_block: I64, cache: LatentCache) -> None:
        self.start, self.end, self.num_blocks = start, end, num_blocks
        self.first_block = first_block  # [rows]
        self._blocks = np.empty((end - start, num_blocks), np.int64)
        self.index = torch.from_numpy(self._blocks.reshape(-1))
        self.bias = torch.empty(end - start, 1, num_blocks * cache.block_size)
        """float32, 0 where a row may look, -inf elsewhere."""

    def point(self, rows: Any, columns: Any, block_ids: I32) -> None:
        self._blocks[rows, columns] = block_ids


class LatentBatch(AttentionBatch):
    """Which token attends to which in one step."""

    _cache: LatentCache  # type: ignore[assignment]
    _writes: LatentWrites  # type: ignore[assignment]
    groups: list[LatentGroup]  # type: ignore[assignment]

    def __init__(
        self, inputs: StepInputs, cache: LatentCache, writes: LatentWrites, queries_per_kv: int, window: int | None
    ) -> None:
        super().__init__(inputs, cache, writes, queries_per_kv, window)  # type: ignore[arg-type]

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, scoring: Scoring | None = None
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, plain_dim + rotary_dim]; key_value: [num_tokens, 1, width], a token's latent and rotated
        part. Returns [num_tokens, num_heads * value_dim]."""
        assert isinstance(scoring, LatentScoring)
        tokens = key_value[:, 0]
        self._writes.store(layer, tokens)
        if len(self.groups) == 1 and not self.rows and self.groups[0].end - self.groups[0].start == query.shape[0]:
            return self._absorbed(layer, query, self.groups[0], scoring)
        out = query.new_zeros(query.shape[0], query.shape[1] * self._cache.shape.value_dim)
        for group in self.groups:
            rows = slice(group.start, group.end)
            out[rows] = self._absorbed(layer, query[rows], group, scoring)
        for row in self.rows:
            self._expanded(layer, query, tokens, row, scoring, out)
        return out

    def _absorbed(self, layer: int, query: torch.Tensor, group: LatentGroup, scoring: LatentScoring) -> torch.Tensor:
        shape, num_rows = self._cache.shape, query.shape[0]
        exact = query.float()
        plain = torch.bmm(exact[..., : shape.plain_dim].transpose(0, 1), scoring.keys)  # [num_heads, num_rows, rank]
        query = torch.cat((plain.transpose(0, 1), exact[..., shape.plain_dim :]), 2)  # [num_rows, num_heads, width]
        seen = self._cache.layers[layer].index_select(0, group.index).view(num_rows, -1, shape.width).float()
        scores = torch.baddbmm(group.bias, query, seen.transpose(1, 2), alpha=scoring.scale)
        shares = torch.softmax(scores, -1)  # [num_rows, num_heads, num_blocks * block_size]
        mixed = torch.bmm(shares, seen[..., : shape.rank])  # [num_rows, num_heads, rank]
        out = torch.bmm(mixed.transpose(0, 1), scoring.values.transpose(1, 2))  # [num_heads, num_rows, value_dim]
        return out.transpose(0, 1).reshape(num_rows, -1).to(self._cache.dtype)

    def _expanded(
        self,
        layer: int,
        query: torch.Tensor,
        fresh: torch.Tensor,
        row: PrefillRow,
        scoring: LatentScoring,
        out: torch.Tensor,
    ) -> None:
        """fresh: the tokens of the step, [num_tokens, width]. out: [num_tokens, num_heads * value_dim]."""
        shape, num_heads = self._cache.shape, query.shape[1]
        if row.block_ids is None:
            seen = fresh[row.start : row.end]
        else:
            seen = self._cache.layers[layer].index_select(0, row.block_ids).view(-1, shape.width)
        latent, rotary = torch.split(seen.float(), [shape.rank, shape.rotary_dim], 1)
        by_head = out.view(len(out), num_heads, shape.value_dim)
        per_head = len(seen) * (shape.plain_dim + shape.rotary_dim + shape.value_dim)
        most = max(1, MAX_EXPANDED // per_head)
        for first in range(0, num_heads, most):
            heads = slice(first, min(num_heads, first + most))
            plain, value = _expand(latent, scoring.keys[heads]), _expand(latent, scoring.values[heads])
            key = torch.cat((plain, rotary.expand(len(plain), -1, -1)), 2).to(out.dtype)
            value = value.to(out.dtype)
            for tile in row.tiles:
                tokens = slice(tile.start, tile.end)
                by_head[tokens, heads] = _tile(query[tokens, heads], key, value, tile, scoring.scale)

    def _group(  # type: ignore[override]
        self, start: int, table: I32, lengths: I64, first_block: I64, num_blocks: I64, first_visible: I64
    ) -> LatentGroup:
        size, longest = self._cache.block_size, int(num_blocks.max())
        group = LatentGroup(start, start + len(lengths), longest, first_block, self._cache)
        group.point_tables(table, first_block, num_blocks, self._cache.zero_block)
        position = np.arange(longest * size) + first_block[:, None] * size
        group.hide((position >= lengths[:, None]) | (position < first_visible[:, None]))
        return group

    def _most_blocks(self) -> int:
        return max(1, MAX_GATHERED // (self._cache.block_size * self._cache.shape.width))


def _expand(latent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """latent: [length, rank]. weight: [heads, dim, rank]. Returns [heads, length, dim]."""
    made = torch.mm(latent, weight.reshape(-1, weight.shape[2]).T)
    return made.view(len(latent), len(weight), -1).transpose(0, 1)


def _tile(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: PrefillTile, scale: float) -> torch.Tensor:
    """query: [tokens, heads, dim]; key: [heads, length, dim]; value: [heads, length, value_dim].

    Returns [tokens, heads, value_dim].
    """
    query = query.transpose(0, 1).contiguous()
    key, value = key[:, tile.first : tile.last], value[:, tile.first : tile.last]
    if tile.is_small:
        query, key, value = query.float(), key.float(), value.float()
    scores = torch.baddbmm(query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0, alpha=scale)
    scores[..., -tile.bias.shape[1] :].add_(tile.bias)
    return torch.bmm(torch.softmax(scores, -1), value).transpose(0, 1)
