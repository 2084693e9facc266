"""`CrossDecoder`: the fused forward of a decoder beside an encoder, on the CPU.

A layer is self attention, cross attention and MLP, each around a residual. The encoder's rows of a step go through one product
a layer, which makes the keys and values of cross attention. All else is for tokens only. Called by the runner, under inference
mode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from actorllm.model.cpu.attention import KVCache, KVWrites, PagedCache, Scoring
from actorllm.model.cpu.layers import linear
from actorllm.model.encoder_decoder.cross_attention import CrossAttention, SelfAttention, StepParts
from actorllm.model.encoder_decoder.cross_plan import EncoderDecoderPlan
from actorllm.model.encoder_decoder.decoder_parts import DecoderParts, LayerParts, distance_table
from actorllm.model.inputs import StepInputs

NEVER = -1e4
"""The logit of a token that is not to be written: finite in every type, and so are sums of some."""


class CrossLayer:
    """Self attention, cross attention and MLP."""

    def __init__(self, parts: LayerParts, around: DecoderParts, index: int, num_heads: int) -> None:
        self.index = index
        self.num_heads = num_heads
        self.scoring = Scoring(around.scale)
        self.norms_inputs, self.is_gated, self.activation = around.norms_inputs, around.is_gated, around.activation
        self.norms = parts.norms
        self.qkv, self.output = linear(parts.qkv), linear(parts.output)
        self.cross_query, self.cross_output = linear(parts.cross_query), linear(parts.cross_output)
        self.cross_key_value = linear(parts.cross_key_value)
        self.up, self.down = linear(parts.up), linear(parts.down)

    def store(self, rows: torch.Tensor, writes: KVWrites) -> None:
        """Make keys and values of the encoder's rows, [num_rows, hidden_size], where the step writes them."""
        writes.store(self.index, self.cross_key_value(rows).view(len(rows), 2 * self.num_heads, -1))

    def __call__(self, x: torch.Tensor, attention: SelfAttention, cross: CrossAttention) -> torch.Tensor:
        """x: the residual stream, [num_tokens, hidden_size]; it is written to."""
        parts = (
            (self.norms[0], lambda seen: self._attended(seen, attention)),
            (self.norms[1], lambda seen: self._crossed(seen, cross)),
            (self.norms[2], self._mlp),
        )
        for norm, part in parts:
            x = part(norm(x)).add_(x) if self.norms_inputs else norm(part(x).add_(x))
        return x

    def _attended(self, seen: torch.Tensor, attention: SelfAttention) -> torch.Tensor:
        heads = self.qkv(seen).view(len(seen), 3 * self.num_heads, -1)
        query, key_value = heads[:, : self.num_heads], heads[:, self.num_heads :]
        return self.output(attention.attend(self.index, query, key_value, self.scoring))

    def _crossed(self, seen: torch.Tensor, cross: CrossAttention) -> torch.Tensor:
        query = self.cross_query(seen).view(len(seen), self.num_heads, -1)
        return self.cross_output(cross.read(self.index, query, self.scoring))

    def _mlp(self, seen: torch.Tensor) -> torch.Tensor:
        if not self.is_gated:
            return self.down(self.activation(self.up(seen)))
        gate, up = self.up(seen).chunk(2, 1)
        return self.down(self.activation(gate).mul_(up))

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        products = (self.qkv, self.output, self.cross_query, self.cross_output, self.up, self.down)
        return sum(product.num_bytes for product in products)


class CrossDecoder:
    """Embedding, layers, norm and head of one model, with the surface of `decoder.Decoder` and that of `probe.Probed`."""

    probed_block_size = 4

    def __init__(self, plan: EncoderDecoderPlan, parts: DecoderParts, dtype: torch.dtype, most: int) -> None:
        """most: positions of a request."""
        self.config, self.dtype = plan, dtype
        self.num_kv_heads = plan.num_heads
        self._embedding, self._embedding_scale = parts.embedding, parts.embedding_scale
        self._positions = parts.positions
        self._embedding_norm, self._norm = parts.embedding_norm, parts.norm
        self._distances: torch.Tensor | None = None
        if parts.distances is not None:
            self._distances = distance_table(parts.distances, plan.config.relative_attention_max_distance, most)
        self._head, self._head_scale = linear(parts.head), parts.head_scale
        self.never: torch.Tensor | None = None
        """int64: tokens that are not to be written; None: all may be."""
        self.layers = [CrossLayer(one, parts, index, plan.num_heads) for index, one in enumerate(parts.layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""
        return self._head.num_bytes + sum(layer.num_bytes for layer in self.layers)

    def forward(self, inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
        """The hidden states before the last norm, [num_tokens, hidden_size], zeros for rows of the encoder."""
        assert isinstance(cache, KVCache)
        step = StepParts.of(inputs)
        tokens = step.tokens
        rows, writes = None, None
        if step.rows is not None:
            rows = torch.from_numpy(inputs.embeds.copy()).view(self.dtype).view(len(step.rows.token_ids), -1)
            writes = KVWrites(step.rows, cache)
        x = self._embed(step)
        attention = SelfAttention(tokens, cache, step.sources, self._distances)
        cross = CrossAttention(tokens, cache, step.sources)
        for layer in self.layers:
            inputs.between_layers()
            if rows is not None and writes is not None:
                layer.store(rows, writes)
            if len(x):
                x = layer(x, attention, cross)
        if step.is_token is None:
            return x
        whole = x.new_zeros(len(inputs.token_ids), x.shape[1])
        whole[torch.from_numpy(step.is_token)] = x
        return whole

    def _embed(self, step: StepParts) -> torch.Tensor:
        tokens, sources = step.tokens, step.sources
        x = torch.embedding(self._embedding, torch.from_numpy(tokens.token_ids))
        if self._embedding_scale != 1:
            x.mul_(self._embedding_scale)
        if self._positions is not None:
            before = np.concatenate(
                (sources.decodes, np.repeat(np.array(sources.prefills, np.int64), tokens.prefill_counts))
            )
            where = tokens.positions.copy()
            where[: len(before)] -= before  # padding is behind
            np.minimum(where, len(self._positions) - 1, out=where)  # a runner's own largest step has only tokens
            x.add_(self._positions.index_select(0, torch.from_numpy(where)))
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def select(self, hidden: torch.Tensor, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]."""
        picked = hidden.index_select(0, torch.from_numpy(rows))
        return picked if self._norm is None else self._norm(picked)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] for what `select` returned."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in the type of the model."""
        made = self._head(hidden if self._head_scale == 1 else hidden * self._head_scale)
        return made if self.never is None else made.index_fill_(1, self.never, NEVER)

    def new_cache(self, num_blocks: int) -> KVCache:
        """An empty one, for the check while loading."""
        plan, size = self.config, self.probed_block_size
        return KVCache(plan.num_layers, plan.num_kv_heads, plan.head_dim, num_blocks, size, self.dtype)
