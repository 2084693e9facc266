"""The fused forward of Llama, Mistral, Qwen2 and Qwen3 on a device, from `model.decoder.DecoderConfig`.

A layer is: norm and the product for query, key and value; norm of heads, rotation and the write to the cache in one launch;
attention; output product plus residual; norm, the product for gate and up, and the activation; down product plus residual.
For few rows the norm before a product and whatever follows it are part of its launch (`skinny_gemm`, where the table of
configurations wants it), else the product is cuBLAS's and the rest are kernels of their own. Both orders give the same up to
rounding; what decides is the number of rows alone.

`decode` makes the launches of a step of one token per sequence, and nothing else, so that they can be recorded as a graph.
`prefill` works on chunks of prompts, with any decode rows in front of them, and is launched kernel by kernel.
Pairs of a rotation are half a head apart, as in the checkpoints. Called by the runner, under inference mode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.messages import I32
from actorllm.model.cuda import ops
from actorllm.model.cuda.cache import DeviceCache
from actorllm.model.cuda.collectives import Collectives, Vocabulary
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.sampling import LMHead
from actorllm.model.cuda.state import StateTable
from actorllm.model.decoder import DecoderConfig
from actorllm.model.layers import inverse_frequencies
from actorllm.model.parallel import HeadShare
from actorllm.model.weights import ALL, Weights
from actorllm_kernels.attn_decode import division
from actorllm_kernels.attn_prefill import query_tiles, tokens_per_tile
from actorllm_kernels.configs import table
from actorllm_kernels.skinny_gemm import is_skinny

MAX_SKINNY_ROWS = 64
"""Above, products are cuBLAS's, whatever the table says."""

HOST_PROGRAMS = 3
"""Of decode attention where there is no GPU to be filled: enough to divide sequences among them."""


@dataclass(slots=True)
class DecodePlan:
    """How the tiles of one window are divided among the programs of decode attention."""

    ends: torch.Tensor  # int32 [num_rows + 1]
    quota: torch.Tensor  # int32 [1]


class DecodeRows:
    """The tensors that a decode step reads and writes beside weights, cache and state table: one row per sequence.

    Allocated once for the largest batch; a step of fewer rows uses the first ones (`first`).
    """

    def __init__(self, num_rows: int, windows: tuple[int, ...], device: torch.device) -> None:
        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.num_rows = num_rows
        self.rows = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        """Slots, or -1: the only thing that a step is told."""
        self.ids, self.positions, self.seq_lens = (integers(num_rows) for _ in range(3))
        self.kv_slots = integers(num_rows, dtype=torch.int64)
        self.plans = {window: DecodePlan(integers(num_rows + 1), integers(1)) for window in windows}

    def first(self, num_rows: int) -> DecodeRows:
        """The same for fewer rows, in the same memory."""
        part = object.__new__(DecodeRows)
        part.num_rows = num_rows
        for name in ("rows", "ids", "positions", "seq_lens", "kv_slots"):
            setattr(part, name, getattr(self, name)[:num_rows])
        part.plans = {w: DecodePlan(plan.ends[: num_rows + 1], plan.quota) for w, plan in self.plans.items()}
        return part


@dataclass(slots=True)
class PrefillRows:
    """The chunks of prompts of a step, behind its decode rows."""

    slots: torch.Tensor  # int32 [num_chunks]
    seq_lens: torch.Tensor  # int32 [num_chunks] with the chunk
    starts: torch.Tensor  # int32 [num_chunks + 1], counted from the first prompt token of the step
    tiles: torch.Tensor  # int32 [num_tiles, 2]


@dataclass(slots=True)
class StepTokens:
    """All tokens of a step: those of the decode rows, then those of the prompts."""

    ids: torch.Tensor  # integers [num_tokens]
    positions: torch.Tensor  # integers [num_tokens]
    kv_slots: torch.Tensor  # int64 [num_tokens]
    decodes: DecodeRows | None
    prefills: PrefillRows | None
    embedded: tuple[torch.Tensor, torch.Tensor] | None = None
    """Which tokens have an embedding that the prompt brought, and those embeddings."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention needs to know of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Those that occur; 0: all keys."""

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


def check_head_size(head_dim: int) -> None:
    """Raises UnsupportedModelError where there is no kernel for heads of this size."""
    sizes = sorted(int(name[1:]) for name in table()["attn_decode"]["sm_90"] if name[1:].isdigit())
    if not sizes[0] // 2 < head_dim <= sizes[-1] or head_dim % 2:
        raise UnsupportedModelError(
            f"heads of size {head_dim} are not supported on CUDA: the kernels take even sizes from {sizes[0] // 2 + 2} to "
            f"{sizes[-1]}; use device='cpu'"
        )


class PagedAttention:
    """Attention over the cache, and the memory it needs. One for all layers: they run one after the other."""

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self.shape = shape
        on = device.torch_device
        self.division = division(on, shape.head_dim, shape.group)
        if on.type != "cuda":
            self.division = self.division._replace(programs=HOST_PROGRAMS)
        self._tokens_per_tile = tokens_per_tile(shape.group, shape.head_dim, on)
        self._device = device
        parts = 2 * self.division.programs
        self._partials = torch.empty(parts, shape.group, shape.head_dim, device=on)
        self._partial_lse = torch.empty(parts, shape.group, device=on)

    def plan(self, rows: DecodeRows, *, pdl: bool) -> None:
        """Once per step, for all layers."""
        for window, plan in rows.plans.items():
            ops.plan_decode(
                rows.seq_lens,
                plan.ends,
                plan.quota,
                self.division.programs,
                self.shape.num_kv_heads,
                window=window,
                tile=self.division.tile,
                pdl=pdl,
            )

    def chunks(self, slots: I32, counts: I32, seq_lens: I32) -> PrefillRows:
        """Upload what the chunks of a step are. counts: tokens of each; seq_lens: with them."""
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        tiles = query_tiles(counts, seq_lens, self._tokens_per_tile)
        parts = (part.astype(np.int32) for part in (slots, seq_lens, starts, tiles))
        one, two, three, four = self._device.upload_parts(*parts)
        return PrefillRows(one, two, three, four.view(-1, 2))

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        tokens: StepTokens,
        table: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> None:
        """q, out: [num_tokens, num_heads, head_dim]; the keys and values of these tokens are in the cache already."""
        num_decodes = 0
        if tokens.decodes is not None:
            rows = tokens.decodes
            num_decodes = rows.num_rows
            plan, part = rows.plans[window], out[:num_decodes]
            ops.attn_decode(
                q[:num_decodes],
                keys,
                values,
                rows.rows,
                table,
                rows.seq_lens,
                plan.ends,
                plan.quota,
                part,
                self._partials,
                self._partial_lse,
                scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                programs=self.division.programs,
                tile=self.division.tile,
                pdl=pdl,
            )
            ops.attn_combine(
                part,
                self._partials,
                self._partial_lse,
                plan.ends,
                plan.quota,
                self.shape.num_kv_heads,
                sinks=sinks,
                pdl=pdl,
            )
        if tokens.prefills is not None:
            chunks = tokens.prefills
            ops.attn_prefill(
                q[num_decodes:],
                keys,
                values,
                chunks.slots,
                table,
                chunks.seq_lens,
                chunks.starts,
                chunks.tiles,
                out[num_decodes:],
                scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )


class DeviceModel(Protocol):
    """A loaded model on a device, as the runner sees it."""

    dtype: torch.dtype
    shape: AttentionShape
    vocab_size: int
    hidden_size: int
    num_bytes: int
    """Bytes of weights that one decode step reads."""
    needs_trial: bool
    """Whether nobody knows that `decode` makes nothing but launches: a recording of it is tried before it is used."""
    head: LMHead | None
    """What follows the hidden states, where sampling may do it itself."""

    def allocate(self, num_rows: int, attention: PagedAttention) -> None:
        """Make room for decode steps of up to so many rows."""

    def decode(self, rows: DecodeRows, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        """One token of every row. Returns their hidden states, [num_rows, hidden_size], in memory of the model's own."""

    def forward(self, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        """Hidden states of any step, [num_tokens, hidden_size]."""

    def kinds_of_forward(self) -> list[int]:
        """Numbers of tokens for which `forward` launches other kernels than for fewer; for many it is always the same ones."""

    def select(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]. rows: int64."""

    def logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """float32 [num_rows, vocab_size] of the hidden states before `select`, of rows that need none."""

    def logits_of_final(self, final: torch.Tensor, logits: torch.Tensor) -> None:
        """The same for what `select` returned."""


@dataclass(slots=True)
class DeviceLayer:
    """The weights of one layer, fused ones as one tensor."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    window: int


class Activations:
    """What flows through the layers, for so many tokens."""

    def __init__(self, num_tokens: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(num_tokens, *shape, dtype=dtype, device=device)

        heads, dim = config.num_heads, config.head_dim
        self.num_tokens = num_tokens
        self.h, self.x, self.delta = (empty(config.hidden_size) for _ in range(3))
        self.qkv = empty((heads + 2 * config.num_kv_heads) * dim)
        self.q, self.out = empty(heads, dim), empty(heads, dim)
        self.gate_up, self.middle = empty(2 * config.intermediate_size), empty(config.intermediate_size)

    def first(self, num_tokens: int) -> Activations:
        """The same for fewer tokens, in the same memory."""
        part = object.__new__(Activations)
        part.num_tokens = num_tokens
        for name in ("h", "x", "delta", "qkv", "q", "out", "gate_up", "middle"):
            setattr(part, name, getattr(self, name)[:num_tokens])
        return part


class DeviceDecoder:
    """See the module docstring."""

    needs_trial = False

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        max_positions: int,
        device: Device,
        collectives: Collectives | None = None,
    ) -> None:
        """Takes this rank's part of all tensors from `weights`, which are on the device.

        config: of the whole model. max_positions: how long a sequence may get. collectives: None for one rank, which has all.
        """
        check_head_size(config.head_dim)
        self.collectives = collectives if collectives is not None else Collectives()
        self.whole = config
        self.share = HeadShare(config, self.collectives.ranks)
        self.config = config = replace(
            config,
            num_heads=self.share.num_heads,
            num_kv_heads=self.share.num_kv_heads,
            intermediate_size=_length(self.collectives.ranks.part(config.intermediate_size)),
        )
        self.device = device
        self.dtype = weights.dtype
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        windows = tuple(window or 0 for window in config.windows)
        self.shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, tuple(dict.fromkeys(windows))
        )
        frequencies = inverse_frequencies(config.head_dim, dict(config.rope), config.max_position_embeddings)
        # Products in float32 as in transformers: at large positions another rounding would be another model.
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.cos, self.sin = angles.cos().to(device.torch_device), angles.sin().to(device.torch_device)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.vocabulary = Vocabulary(self.collectives, vocab)
        ids = self._part(self.vocabulary.part)
        self.embedding = self.vocabulary.padded(weights.take("model.embed_tokens.weight", vocab, hidden, rows=ids))
        self.layers = [self._layer(weights, i, window) for i, window in enumerate(windows)]
        self.norm = weights.take("model.norm.weight", hidden)
        self.lm_head = self.embedding
        if not config.ties_embeddings:
            self.lm_head = self.vocabulary.padded(weights.take("lm_head.weight", vocab, hidden, rows=ids))
        weights.close(
            is_ignorable=lambda name: (
                name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.ties_embeddings)
            )
        )
        self.head: LMHead | None = LMHead(self.lm_head, self.norm, config.rms_norm_eps)
        if self.collectives.size > 1:  # whose logits are gathered before any is chosen
            self.head = None
        matrices = [w for y in self.layers for w in (y.qkv, y.output, y.gate_up, y.down)]
        self.num_bytes = sum(w.numel() * w.element_size() for w in [*matrices, self.lm_head])
        self._activations: Activations
        self._attention: PagedAttention

    def _part(self, part: slice) -> slice:
        """What one rank takes as a whole is not cut."""
        return part if self.collectives.size > 1 else ALL

    def _layer(self, weights: Weights, index: int, window: int) -> DeviceLayer:
        config, prefix, share = self.whole, f"model.layers.{index}.", self.share
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        q_part, kv_part = self._part(share.rows(share.heads)), self._part(share.rows(share.kv_heads))
        inner_part = self._part(self.collectives.ranks.part(inner))

        def weight(name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
            return weights.take(f"{prefix}{name}.weight", *shape, rows=rows, columns=columns).contiguous()

        def fused(names: tuple[tuple[str, int, slice], ...], columns: int) -> torch.Tensor:
            return torch.cat([weight(name, rows, columns, rows=part) for name, rows, part in names])

        def bias(names: tuple[tuple[str, int, slice], ...], is_there: bool) -> torch.Tensor | None:
            parts = [weights.take(f"{prefix}{name}.bias", n, rows=p) for name, n, p in names] if is_there else []
            return torch.cat(parts) if parts else None

        def bias_of_sum(name: str, is_there: bool) -> torch.Tensor | None:
            whole = bias(((name, hidden, ALL),), is_there)
            return whole if self.collectives.rank == 0 else None  # added once

        qkv = (
            ("self_attn.q_proj", q_size, q_part),
            ("self_attn.k_proj", kv_size, kv_part),
            ("self_attn.v_proj", kv_size, kv_part),
        )
        gate_up = (("mlp.gate_proj", inner, inner_part), ("mlp.up_proj", inner, inner_part))
        return DeviceLayer(
            input_norm=weight("input_layernorm", hidden),
            qkv=fused(qkv, hidden),
            qkv_bias=bias(qkv, config.has_qkv_bias),
            head_norms=(weight("self_attn.q_norm", dim), weight("self_attn.k_norm", dim))
            if config.has_qk_norm
            else None,
            output=weight("self_attn.o_proj", hidden, q_size, columns=q_part),
            output_bias=bias_of_sum("self_attn.o_proj", config.has_output_bias),
            mlp_norm=weight("post_attention_layernorm", hidden),
            gate_up=fused(gate_up, hidden),
            gate_up_bias=bias(gate_up, config.has_mlp_bias),
            down=weight("mlp.down_proj", hidden, inner, columns=inner_part),
            down_bias=bias_of_sum("mlp.down_proj", config.has_mlp_bias),
            window=window,
        )

    def allocate(self, num_rows: int, attention: PagedAttention) -> None:
        self._attention = attention
        self._activations = Activations(num_rows, self.config, self.dtype, self.device.torch_device)
        self.vocabulary.allocate(num_rows, self.device.torch_device)

    def decode(self, rows: DecodeRows, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        tokens = StepTokens(rows.ids, rows.positions, rows.kv_slots, rows, None)
        return self._run(self._activations.first(rows.num_rows), tokens, cache, state, pdl=pdl)

    def forward(self, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool = False) -> torch.Tensor:
        activations = Activations(len(tokens.ids), self.config, self.dtype, self.device.torch_device)
        return self._run(activations, tokens, cache, state, pdl=pdl)

    def kinds_of_forward(self) -> list[int]:
        config, on = self.config, self.device.torch_device
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        products = ((qkv, False), (config.hidden_size, False), (config.intermediate_size, True))

        def kind(num_tokens: int) -> tuple[int, list[bool]]:
            # kernels for few rows are compiled for the next power of two
            fused = [is_skinny(num_tokens, outputs, is_gated, on) for outputs, is_gated in products]
            return max(16, 1 << (num_tokens - 1).bit_length()), fused

        return [1, *(n for n in range(2, MAX_SKINNY_ROWS + 1) if kind(n) != kind(n - 1))]

    def select(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        chosen = hidden.index_select(0, rows)
        ops.rmsnorm(chosen, self.norm, self.config.rms_norm_eps, chosen)
        return chosen

    def logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        final = self._activations.x[: len(hidden)]
        ops.rmsnorm(hidden, self.norm, self.config.rms_norm_eps, final)
        self.logits_of_final(final, logits)

    def logits_of_final(self, final: torch.Tensor, logits: torch.Tensor) -> None:
        self.vocabulary.logits(final, self.lm_head, logits)

    def _run(
        self, a: Activations, tokens: StepTokens, cache: DeviceCache, state: StateTable, *, pdl: bool
    ) -> torch.Tensor:
        """All layers; the residual stream is `a.h`."""
        config, attention = self.config, self._attention
        scale, eps = config.head_dim**-0.5, config.rms_norm_eps
        self.vocabulary.embed(tokens.ids, self.embedding, a.h, pdl=pdl)
        if tokens.embedded is not None:
            a.h.index_copy_(0, *tokens.embedded)
        stream = ResidualStream(a, eps, pdl, self.device.torch_device, self.collectives)
        for index, layer in enumerate(self.layers):
            keys, values = cache.layers[index]
            stream.normed_product(layer.input_norm, layer.qkv, layer.qkv_bias, a.qkv)
            ops.qknorm_rope_kv(
                a.qkv,
                tokens.positions,
                tokens.kv_slots,
                self.cos,
                self.sin,
                a.q,
                keys,
                values,
                layer.head_norms,
                eps,
                pdl=pdl,
            )
            attention.attend(
                a.q, keys, values, a.out, tokens, state.block_table, scale=scale, window=layer.window, pdl=pdl
            )
            stream.add_product(a.out.view(a.num_tokens, -1), layer.output, layer.output_bias)
            stream.normed_product(layer.mlp_norm, layer.gate_up, layer.gate_up_bias, a.middle, activation="silu")
            stream.add_product(a.middle, layer.down, layer.down_bias)
        stream.settle()
        return a.h


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class ResidualStream:
    """Products that read the residual stream or add to it, by whichever kernel is meant for the number of rows."""

    def __init__(self, a: Activations, eps: float, pdl: bool, device: torch.device, collectives: Collectives) -> None:
        self._a, self._eps, self._pdl, self._device, self._collectives = a, eps, pdl, device, collectives
        self._has_delta = False
        """`a.delta` is yet to be added; the next norm does that on its way."""

    def normed_product(
        self,
        norm: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        activation: str = "",
    ) -> None:
        """y = activation(norm(stream) @ weight.T + bias)."""
        a, eps, pdl = self._a, self._eps, self._pdl
        if self._is_skinny(y.shape[1], bool(activation)):
            self.settle()
            ops.skinny_gemm(a.h, weight, y, norm=norm, eps=eps, bias=bias, activation=activation, pdl=pdl)
            return
        if self._has_delta:
            ops.rmsnorm(a.delta, norm, eps, a.x, a.h, pdl=pdl)
            self._has_delta = False
        else:
            ops.rmsnorm(a.h, norm, eps, a.x, pdl=pdl)
        if activation:
            ops.linear(a.x, weight, a.gate_up, bias)
            ops.activation_mul(a.gate_up, y, activation, pdl=pdl)
        else:
            ops.linear(a.x, weight, y, bias)

    def add_product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """stream += x @ weight.T + bias, summed over the ranks."""
        a = self._a
        is_skinny = self._is_skinny(a.h.shape[1], False)
        if self._collectives.size > 1:  # the stream itself is whole everywhere: it is not a part of the sum
            assert not self._has_delta
            if is_skinny:
                ops.skinny_gemm(x, weight, a.delta, bias=bias, pdl=self._pdl)
            else:
                ops.linear(x, weight, a.delta, bias)
            self._collectives.sum_(a.delta)
            self._has_delta = True
        elif is_skinny:
            self.settle()
            ops.skinny_gemm(x, weight, a.h, bias=bias, residual=a.h, pdl=self._pdl)
        else:
            assert not self._has_delta
            ops.linear(x, weight, a.delta, bias)
            self._has_delta = True

    def settle(self) -> None:
        """Let the stream be complete."""
        if self._has_delta:
            ops.add(self._a.h, self._a.delta)
            self._has_delta = False

    def _is_skinny(self, num_outputs: int, is_gated: bool) -> bool:
        return is_skinny(self._a.num_tokens, num_outputs, is_gated, self._device)
