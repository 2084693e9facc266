"""Attention of a decoder beside an encoder: over the tokens before, and over the encoder's rows of the same request.

A request's first positions are rows of the encoder, `num_source` of them, and its tokens follow (`model.encoder_decoder`). Self
attention sees positions from `num_source` on, cross attention those before. Both read the paged cache as `model.cpu.attention`
does. The groups of cross attention stay as they are while the decode rows do. A row without a source reads zeros; only a runner's
own checks have such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.cpu.attention import (
    MAX_TILE_SCORES,
    QUERY_TILE,
    AttentionBatch,
    DecodeContext,
    DecodeGroup,
    KVCache,
    KVWrites,
    PrefillRow,
    PrefillTile,
    Scoring,
)
from actorllm.model.inputs import StepInputs

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

CROSS = -1
"""Under which the cache keeps the groups of cross attention, where others have a window."""


@dataclass(frozen=True, slots=True)
class Sources:
    """How many rows of the encoder stand before the tokens of each row of a step."""

    decodes: I64  # [num_decodes]
    prefills: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepParts:
    """A step, taken apart: what goes through the layers, and what only cross attention reads."""

    tokens: StepInputs
    sources: Sources
    rows: StepInputs | None
    """The encoder's rows of the step, as prefill rows; None: there are none."""
    is_token: I64 | None
    """[num_tokens] where the tokens are in the whole step; None: it has nothing else."""

    @classmethod
    def of(cls, inputs: StepInputs) -> StepParts:
        """Of the inputs of a batch with sources."""
        decodes = inputs.decode_sources
        if decodes is None:  # of a runner's own checks
            decodes = np.zeros(inputs.num_decodes, np.int64)
        prefills = inputs.prefill_sources or [0] * len(inputs.prefill_slots)
        if inputs.embedded is None:
            return cls(inputs, Sources(decodes, prefills), None, None)
        tokens: list[int] = []
        rows: list[int] = []
        for index, (first, count) in enumerate(zip(inputs.prefill_first, inputs.prefill_counts, strict=True)):
            if first < prefills[index]:
                rows.append(index)
            if first + count > prefills[index]:
                tokens.append(index)
        lows = [max(inputs.prefill_first[i], prefills[i]) for i in tokens]
        highs = [min(inputs.prefill_first[i] + inputs.prefill_counts[i], prefills[i]) for i in rows]
        of_rows, is_row = _part(inputs, rows, [inputs.prefill_first[i] for i in rows], highs, 0)
        ends = [inputs.prefill_first[i] + inputs.prefill_counts[i] for i in tokens]
        of_tokens, is_token = _part(inputs, tokens, lows, ends, inputs.num_decodes)
        if not np.array_equal(is_row, inputs.embedded):
            raise ValueError("the rows of an encoder must be the first positions of their request")
        return cls(of_tokens, Sources(decodes, [prefills[i] for i in tokens]), of_rows, is_token)


def _part(
    inputs: StepInputs, rows: list[int], firsts: list[int], ends: list[int], num_decodes: int
) -> tuple[StepInputs, I64]:
    """Positions [first, end) of some prefill rows, behind the decode rows; and which tokens of the step they are."""
    picked = [np.arange(num_decodes)]
    starts, at = [], num_decodes
    for row, first, end in zip(rows, firsts, ends, strict=True):
        begin = inputs.prefill_starts[row] + first - inputs.prefill_first[row]
        picked.append(np.arange(begin, begin + end - first))
        starts.append(at)
        at += end - first
    where = np.concatenate(picked)
    part = replace(
        inputs,
        token_ids=inputs.token_ids[where],
        positions=inputs.positions[where],
        kv_slots=inputs.kv_slots[where],
        num_decodes=num_decodes,
        prefill_slots=[inputs.prefill_slots[row] for row in rows],
        prefill_starts=starts,
        prefill_counts=[end - first for first, end in zip(firsts, ends, strict=True)],
        prefill_first=firsts,
        prefill_tables=[inputs.prefill_tables[row] for row in rows],
        num_prompts=[inputs.num_prompts[row] for row in rows],
        embedded=None,
    )
    return part, where


class SelfAttention(AttentionBatch):
    """Tokens that see those of their request before them, with or without what their distance adds to scores."""

    def __init__(
        self, inputs: StepInputs, cache: KVCache, sources: Sources, distances: torch.Tensor | None = None
    ) -> None:
        """distances: of `decoder_parts.distance_table`."""
        self._cache, self._writes, self.queries_per_kv, self._window = cache, KVWrites(inputs, cache), 1, None
        self._sources, self._distances = sources.decodes, distances
        self.groups = list(self._decode_groups(inputs)) if inputs.num_decodes else []
        if distances is not None:
            for group in self.groups:
                self._add_distances(group, inputs.decode_lengths[group.start : group.end], distances)
        self.rows = [
            self._row(*row)
            for row in zip(
                inputs.prefill_tables,
                inputs.prefill_starts,
                inputs.prefill_counts,
                inputs.prefill_first,
                sources.prefills,
                strict=True,
            )
        ]
        self._has_fresh_rows = False

    def _visible(self, lengths: I64) -> tuple[I64, I64, I64]:
        size = self._cache.block_size
        first_visible = np.minimum(self._sources, lengths - 1)
        first_block = first_visible // size
        return first_block, -(-lengths // size) - first_block, first_visible

    def _add_distances(self, group: DecodeGroup, lengths: I64, distances: torch.Tensor) -> None:
        """What is added to the scores of a group is another for each head, and in each step."""
        size = self._cache.block_size
        first = np.minimum(self._sources[group.start : group.end], lengths - 1)
        position = np.arange(group.num_blocks * size) + group.first_block[:, None] * size
        distance = (lengths - 1)[:, None] - position
        distance[(distance < 0) | (position < first[:, None])] = len(distances) - 1
        added = distances.index_select(0, torch.from_numpy(distance.reshape(-1)))
        group.bias = added.view(*distance.shape, -1).transpose(1, 2).contiguous()

    def _row(self, table: I32, start: int, count: int, first: int, source: int) -> PrefillRow:
        size = self._cache.block_size
        offset = source // size * size
        ids = torch.from_numpy(table[offset // size : -(-(first + count) // size)])
        tiles = []
        for a, b in _tiles(count, first + count - offset, self._cache.num_kv_heads):
            key, query = torch.arange(source, first + b), torch.arange(first + a, first + b).unsqueeze(1)
            distance = query - key  # [num_tokens, num_keys]
            if self._distances is None:
                bias = torch.zeros(distance.shape).masked_fill_(distance < 0, -torch.inf)
            else:
                distance[distance < 0] = len(self._distances) - 1
                bias = self._distances.float()[distance].permute(2, 0, 1).unsqueeze(1)  # [num_heads, 1, ...]
            tiles.append(_tile(self._cache, start + a, start + b, source - offset, first + b - offset, bias))
        return PrefillRow(start, start + count, ids, tiles)


class CrossAttention(AttentionBatch):
    """Tokens that see all rows of the encoder of their request."""

    def __init__(self, inputs: StepInputs, cache: KVCache, sources: Sources) -> None:
        self._cache, self.queries_per_kv, self._window = cache, 1, None
        self.groups = self._kept_groups(inputs, sources.decodes) if inputs.num_decodes else []
        self.rows = [
            self._row(table, start, count, source)
            for table, start, count, source in zip(
                inputs.prefill_tables, inputs.prefill_starts, inputs.prefill_counts, sources.prefills, strict=True
            )
            if source
        ]
        self._has_fresh_rows = False

    def read(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim]. Returns [num_tokens, num_heads * head_dim]."""
        return self._attended(layer, query, None, scoring)

    def _kept_groups(self, inputs: StepInputs, sources: I64) -> list[DecodeGroup]:
        """Those of the step before, if its decode rows are the same in the same order."""
        kept, slots = self._cache.decodes.get(CROSS), inputs.token_slots.astype(np.int64)
        if kept is not None and kept.version == inputs.decode_version and np.array_equal(kept.lengths, slots):
            return kept.groups
        table = inputs.decode_table
        if not sources.all():
            table = table.copy()
            table[sources == 0] = self._cache.zero_block
        seen = replace(inputs, decode_table=table, decode_lengths=np.maximum(sources, 1), is_sorted=False)
        made = self._cache.decodes[CROSS] = DecodeContext(inputs.decode_version, slots, self._new_groups(seen))
        return made.groups

    def _visible(self, lengths: I64) -> tuple[I64, I64, I64]:
        nothing = np.zeros(len(lengths), np.int64)
        return nothing, -(-lengths // self._cache.block_size), nothing

    def _row(self, table: I32, start: int, count: int, source: int) -> PrefillRow:
        ids = torch.from_numpy(table[: -(-source // self._cache.block_size)])
        tiles = [
            _tile(self._cache, start + a, start + b, 0, source, torch.zeros(b - a, 1))
            for a, b in _tiles(count, source, self._cache.num_kv_heads)
        ]
        return PrefillRow(start, start + count, ids, tiles)


def _tiles(count: int, num_keys: int, num_heads: int) -> list[tuple[int, int]]:
    """Parts of a row of so many tokens."""
    size = max(16, min(QUERY_TILE, MAX_TILE_SCORES // (num_heads * num_keys)))
    return [(a, min(count, a + size)) for a in range(0, count, size)]


def _tile(cache: KVCache, start: int, end: int, first: int, last: int, bias: torch.Tensor) -> PrefillTile:
    """Prompts of a decoder are short: they are computed in float32 whatever the model's type is."""
    return PrefillTile(start, end, first, last, bias, cache.dtype != torch.float32)
