"""A cache of pages that rows join, leave, grow and skip, and dense attention in float64 beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from actorllm.messages import StepPlan
from actorllm.model.cpu.attention import AttentionBatch, Chunk, KVCache, KVWrites
from actorllm.model.inputs import PersistentBatch
from tests.model.columns import new_columns
from tests.model.driver import int32

NUM_SLOTS, MAX_LENGTH = 10, 60


@dataclass(frozen=True, slots=True)
class Shape:
    """What stays the same in a run: one layer per window."""

    num_kv_heads: int
    fold: int
    head_dim: int
    block_size: int
    windows: tuple[int | None, ...]
    sort_gain: int
    seed: int


STEPS = st.lists(st.lists(st.integers(0, 99), min_size=NUM_SLOTS, max_size=NUM_SLOTS), min_size=5, max_size=30)
"""For every slot of every step a number that its request, or the lack of one, makes a wish of."""


@dataclass(slots=True)
class Row:
    """A request: its blocks and, by layer, the keys and values of its tokens so far."""

    blocks: list[int]
    num_prompt: int
    history: list[list[torch.Tensor]]
    """Tensors of [2 * num_kv_heads, head_dim]."""

    @property
    def num_computed(self) -> int:
        return len(self.history[0])


class Pages:
    """A cache full of what others left behind, the requests that use it now, and a copy of what it must contain."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.max_blocks = -(-MAX_LENGTH // shape.block_size)
        num_blocks = 6 * self.max_blocks
        self.cache = KVCache(
            len(shape.windows), shape.num_kv_heads, shape.head_dim, num_blocks, shape.block_size, torch.float32
        )
        self.batch = PersistentBatch(
            vocab_size=2,
            block_size=shape.block_size,
            num_blocks=num_blocks,
            max_blocks=self.max_blocks,
            sort_gain=shape.sort_gain,
            padding_block=self.cache.padding_block,
        )
        self.random = torch.Generator().manual_seed(shape.seed)
        stale = self.cache.pool[:, :num_blocks]
        stale.copy_(torch.randn(stale.shape, generator=self.random) * 50)
        self.mirror = self.cache.pool.clone()
        self.free = torch.randperm(num_blocks, generator=self.random).tolist()
        self.rows: dict[int, Row] = {}
        self.sent: list[int] = []
        self.num_steps = 0

    def step(self, wishes: list[int]) -> None:
        plan = self._plan(wishes)
        self.batch.apply(plan)
        inputs = self.batch.inputs(plan)
        num_tokens = len(inputs.token_ids)
        if not num_tokens:
            return
        writes = KVWrites(inputs, self.cache)
        batches = [AttentionBatch(inputs, self.cache, writes, self.shape.fold, w) for w in self.shape.windows]
        tokens = [(int(t), self.rows[s]) for s, t in zip(self.sent, inputs.result_tokens, strict=False)]
        for slot, start, count in zip(inputs.prefill_slots, inputs.prefill_starts, inputs.prefill_counts, strict=True):
            tokens += [(start + i, self.rows[slot]) for i in range(count)]
        heads = self.shape.num_kv_heads
        for layer, (window, batch) in enumerate(zip(self.shape.windows, batches, strict=True)):
            fused = torch.randn(num_tokens, heads * (self.shape.fold + 2), self.shape.head_dim, generator=self.random)
            query, key_value = fused[:, : -2 * heads], fused[:, -2 * heads :]
            positions = [self._remember(layer, row, key_value[token]) for token, row in tokens]
            out = batch.attend(layer, query, key_value)
            assert torch.isfinite(out).all()
            for (token, row), position in zip(tokens, positions, strict=True):
                expected = self._dense(query[token], row.history[layer][: position + 1], window)
                torch.testing.assert_close(out[token].double(), expected, rtol=1e-4, atol=1e-4)
        self.batch.advance(inputs)
        self.batch.store(inputs.result_slots, np.zeros(len(inputs.result_slots), np.int32))
        end = self.cache.padding_block
        assert torch.equal(self.cache.pool[:, :end], self.mirror[:, :end]), "something else was written, too"

    def _plan(self, wishes: list[int]) -> StepPlan:
        """Below 4: leave. From 90 on: skip a step. In between: decode, or prefill a third as many tokens.

        Of a free slot, also of one that is left in this step: come with so many tokens.
        """
        size = self.shape.block_size
        freed, new, extended, prefill, decode = [], [], [], [], []
        for slot, wish in enumerate(wishes):
            row = self.rows.get(slot)
            if row is not None and (wish < 4 or row.num_computed == MAX_LENGTH):
                freed.append(slot)
                self.free[:0] = self.rows.pop(slot).blocks
                row = None
            if row is None and 0 < wish < MAX_LENGTH and -(-wish // size) <= len(self.free):
                blocks = [self.free.pop() for _ in range(-(-wish // size))]
                row = self.rows[slot] = Row(blocks, wish, [[] for _ in self.shape.windows])
                new.append({"slot": slot, "tokens": [0] * wish, "blocks": [list(blocks)]})
            if row is None:
                continue
            if row.num_computed < row.num_prompt:
                prefill.append((slot, min(row.num_prompt - row.num_computed, 1 + wish // 3)))
            elif wish < 90:
                if row.num_computed == size * len(row.blocks):
                    if not self.free:
                        continue
                    row.blocks.append(self.free.pop())
                    extended.append((slot, row.blocks[-1]))
                decode.append(slot)
        self.num_steps += 1
        columns: dict[str, Any] = new_columns(new) if new else {}
        if decode != self.sent:
            columns["decode_slots"] = int32(decode)
            self.sent = decode
        return StepPlan(
            step=self.num_steps,
            freed=int32(freed),
            extended_slots=int32([s for s, _ in extended]),
            extended_blocks=int32([b for _, b in extended]),
            extended_groups=np.zeros(len(extended), np.uint8),
            prefill_slots=int32([s for s, _ in prefill]),
            prefill_counts=int32([n for _, n in prefill]),
            **columns,
        )

    def _remember(self, layer: int, row: Row, key_value: torch.Tensor) -> int:
        """The next token of a row; returns its position."""
        heads, dim, size = self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size
        position = len(row.history[layer])
        row.history[layer].append(key_value)
        block = self.mirror[layer, row.blocks[position // size]]
        block[:heads].view(heads, dim, size)[:, :, position % size] = key_value[:heads]
        block[heads:].view(heads, size, dim)[:, position % size] = key_value[heads:]
        return position

    def _dense(self, query: torch.Tensor, history: list[torch.Tensor], window: int | None) -> torch.Tensor:
        if isinstance(window, Chunk):
            window = (len(history) - 1) % window + 1
        visible = torch.stack(history[-window:] if window is not None else history, 1).double()
        key, value = visible.repeat_interleave(self.shape.fold, 0).chunk(2)  # each [num_heads, length, head_dim]
        scores = torch.einsum("hd,hnd->hn", query.double(), key) * self.shape.head_dim**-0.5
        return torch.einsum("hn,hnd->hd", torch.softmax(scores, -1), value).reshape(-1)
