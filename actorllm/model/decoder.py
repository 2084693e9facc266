"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: one fused forward, with the differences as fields.

A family's module (`llama`, `mistral`, ...) turns a config.json into a `DecoderConfig`; everything after that is here.
With several ranks, each holds its heads, its part of the MLP and of the vocabulary (`parallel`).
Per layer: norm, one product for query, key and value, rotation, attention, output product plus residual, norm, one
product for gate and up, silu, down product plus residual. Called by the runner, under inference mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.attention import AttentionBatch, KVCache, KVWrites
from actorllm.model.embeds import place_rows
from actorllm.model.inputs import StepInputs
from actorllm.model.layers import (
    ROPE_TYPES,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    interleave,
    inverse_frequencies,
    silu_mul,
)
from actorllm.model.parallel import HeadShare, Ranks
from actorllm.model.weights import ALL, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a model and the switches in which the families differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    ties_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window of every layer; a token sees itself and the window - 1 tokens before it. None: all."""
    has_head: bool = True
    """False: only its final hidden states are wanted."""

    @classmethod
    def from_hugging_face(cls, hf: Mapping[str, Any], **differences: Any) -> DecoderConfig:
        """The fields that all four families name alike. Raises CorruptModelError or UnsupportedModelError."""
        hidden_size, num_heads = positive(hf, "hidden_size"), positive(hf, "num_attention_heads")
        num_kv_heads = positive(hf, "num_key_value_heads", num_heads)
        num_layers = positive(hf, "num_hidden_layers")
        if num_heads % num_kv_heads:
            raise CorruptModelError(
                f"config.json: num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
            )
        if hf.get("head_dim") is None and hidden_size % num_heads:
            raise CorruptModelError(
                f"config.json: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}"
            )
        activation = hf.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; only 'silu' is")
        if hf.get("quantization_config") is not None:
            method = hf["quantization_config"].get("quant_method", "unknown")
            raise UnsupportedModelError(f"quantized weights ({method}) are not supported; use the original model")
        head_dim = positive(hf, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim={head_dim} is odd; rotary embeddings need pairs")
        return cls(
            vocab_size=positive(hf, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive(hf, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope=rope_parameters(hf),
            max_position_embeddings=positive(hf, "max_position_embeddings", 2048),
            ties_embeddings=bool(hf.get("tie_word_embeddings", False)),
            **({"windows": (None,) * num_layers} | differences),
        )


def positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of config.json; CorruptModelError when it is something else."""
    value = hf.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CorruptModelError(f"config.json: {key} is {value!r}, a positive integer is needed")
    return value


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes it, or the older `rope_theta` and `rope_scaling`."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError("rope parameters that differ between layers are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = hf.get("rope_theta") or 10_000.0
    rotated = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if rotated not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor={rotated} is not supported; only 1 is")
    return rope


def windows_by_layer_type(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows of Qwen2 and Qwen3: off unless use_sliding_window, and then from layer max_window_layers on."""
    window = positive(hf, "sliding_window", 4096) if hf.get("use_sliding_window") else None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(types) != num_layers:
        raise CorruptModelError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"attention of type {sorted(unknown)[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


class DecoderLayer:
    """Attention and MLP, each around a residual."""

    def __init__(self, config: DecoderConfig, weights: Weights, index: int, ranks: Ranks, share: HeadShare) -> None:
        """config: of the whole model."""
        self.index = index
        self._ranks = ranks
        self.num_heads, self.num_kv_heads, self.head_dim = share.num_heads, share.num_kv_heads, config.head_dim
        self.window = config.windows[index]
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_part, kv_part, inner_part = share.rows(share.heads), share.rows(share.kv_heads), ranks.part(inner)
        prefix = f"model.layers.{index}."

        def weight(name: str, *shape: int, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
            return weights.take(f"{prefix}{name}.weight", *shape, rows=rows, columns=columns)

        def bias(name: str, size: int, is_there: bool, part: slice = ALL) -> torch.Tensor | None:
            return weights.take(f"{prefix}{name}.bias", size, rows=part) if is_there else None

        def bias_of_sum(name: str, size: int, is_there: bool) -> torch.Tensor | None:
            whole = bias(name, size, is_there)
            return whole if ranks.rank == 0 else None  # added once

        def rotated(tensor: torch.Tensor) -> torch.Tensor:
            return interleave(tensor, config.head_dim)

        q_bias, k_bias, v_bias = (
            bias(f"self_attn.{name}_proj", size, config.has_qkv_bias, part)
            for name, size, part in (("q", q_size, q_part), ("k", kv_size, kv_part), ("v", kv_size, kv_part))
        )
        self.input_norm = RMSNorm(weights.take(f"{prefix}input_layernorm.weight", hidden), config.rms_norm_eps)
        self.qkv = Linear.fused(
            [
                rotated(weight("self_attn.q_proj", q_size, hidden, rows=q_part)),
                rotated(weight("self_attn.k_proj", kv_size, hidden, rows=kv_part)),
                weight("self_attn.v_proj", kv_size, hidden, rows=kv_part),
            ],
            [
                rotated(q_bias) if q_bias is not None else None,
                rotated(k_bias) if k_bias is not None else None,
                v_bias,
            ],
        )
        self.qk_norm: QKNorm | None = None
        if config.has_qk_norm:
            q_norm = rotated(weights.take(f"{prefix}self_attn.q_norm.weight", config.head_dim))
            k_norm = rotated(weights.take(f"{prefix}self_attn.k_norm.weight", config.head_dim))
            self.qk_norm = QKNorm(q_norm, k_norm, share, config.rms_norm_eps)
        self.output = Linear(
            weight("self_attn.o_proj", hidden, q_size, columns=q_part),
            bias_of_sum("self_attn.o_proj", hidden, config.has_output_bias),
        )
        self.mlp_norm = RMSNorm(weights.take(f"{prefix}post_attention_layernorm.weight", hidden), config.rms_norm_eps)
        self.gate_up = Linear.fused(
            [weight(f"mlp.{name}_proj", inner, hidden, rows=inner_part) for name in ("gate", "up")],
            [bias(f"mlp.{name}_proj", inner, config.has_mlp_bias, inner_part) for name in ("gate", "up")],
        )
        self.down = Linear(
            weight("mlp.down_proj", hidden, inner, columns=inner_part),
            bias_of_sum("mlp.down_proj", hidden, config.has_mlp_bias),
        )

    def __call__(self, x: torch.Tensor, rotations: torch.Tensor, attention: AttentionBatch) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; rotations: [num_tokens, 1, head_dim / 2]."""
        heads = self.qkv(self.input_norm(x)).view(x.shape[0], -1, self.head_dim)  # [num_tokens, q + k + v heads, dim]
        self._rotate(heads[:, : self.num_heads + self.num_kv_heads], rotations)
        attended = attention.attend(self.index, heads[:, : self.num_heads], heads[:, self.num_heads :])
        x = self._ranks.sum_(self.output(attended)).add_(x)
        return self._ranks.sum_(self.down(silu_mul(self.gate_up(self.mlp_norm(x))))).add_(x)

    def _rotate(self, heads: torch.Tensor, rotations: torch.Tensor) -> None:
        """Normalise (Qwen3) and rotate queries and keys in place, in float32 inside."""
        exact = heads.float()  # [num_tokens, q + k heads, head_dim]; the same memory where the model is float32
        if self.qk_norm is not None:
            self.qk_norm.apply_(exact)
        torch.view_as_complex(exact.view(*exact.shape[:2], -1, 2)).mul_(rotations)
        if exact is not heads:
            heads.copy_(exact)


class QKNorm:
    """RMSNorm over the dimensions of every query and key head, in place and in float32."""

    def __init__(self, q_weight: torch.Tensor, k_weight: torch.Tensor, share: HeadShare, eps: float) -> None:
        dim = len(q_weight)
        rows = [q_weight.float()] * share.num_heads + [k_weight.float()] * share.num_kv_heads
        # norm = sqrt(sum of squares), so x / sqrt(mean + eps) = sqrt(dim) * x / hypot(norm, sqrt(dim * eps))
        self.weight = torch.stack(rows) * dim**0.5  # [q + k heads, head_dim]
        self.floor = torch.tensor((dim * eps) ** 0.5)

    def apply_(self, heads: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(heads, 2, -1, True)  # [num_tokens, q + k heads, 1]
        heads.div_(norm.hypot_(self.floor)).mul_(self.weight)


class Decoder:
    """Embedding, layers, final norm and LM head of one model."""

    def __init__(self, config: DecoderConfig, weights: Weights, max_positions: int, ranks: Ranks | None = None) -> None:
        """Takes this rank's part of all tensors from `weights`. max_positions: how long a sequence may get."""
        self.config = config
        self.ranks = ranks or Ranks()
        self.share = HeadShare(config, self.ranks)
        self.dtype = weights.dtype
        frequencies = inverse_frequencies(config.head_dim, dict(config.rope), config.max_position_embeddings)
        self.rotary = RotaryEmbedding(frequencies, max_positions)
        vocab, hidden = config.vocab_size, config.hidden_size
        self._vocab_part = self.ranks.part(vocab)
        self.embedding = weights.take("model.embed_tokens.weight", vocab, hidden, rows=self._vocab_part)
        self.layers = [DecoderLayer(config, weights, i, self.ranks, self.share) for i in range(config.num_layers)]
        self.norm = RMSNorm(weights.take("model.norm.weight", hidden), config.rms_norm_eps)
        self.lm_head: Linear | None = None
        if config.has_head:
            head = self.embedding
            if not config.ties_embeddings:
                head = weights.take("lm_head.weight", vocab, hidden, rows=self._vocab_part)
            self.lm_head = Linear(head)
        weights.close(is_ignorable=lambda name: self._is_redundant(name))

    def _is_redundant(self, name: str) -> bool:
        """Tensors that checkpoints carry although the config determines them, or nobody needs them."""
        needs_no_head = self.config.ties_embeddings or not self.config.has_head
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and needs_no_head)

    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""
        return self.share.num_kv_heads

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""
        linears = [linear for y in self.layers for linear in (y.qkv, y.output, y.gate_up, y.down)]
        return sum(linear.num_bytes for linear in [*linears, *([self.lm_head] if self.lm_head is not None else [])])

    def forward(self, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        """The hidden states before the final norm, [num_tokens, hidden_size]; keys and values go to the cache."""
        fold = self.share.num_heads // self.share.num_kv_heads
        writes = KVWrites(inputs, cache)
        attention = {w: AttentionBatch(inputs, cache, writes, fold, w) for w in dict.fromkeys(self.config.windows)}
        rotations = self.rotary.rotations(torch.from_numpy(inputs.positions))
        x = self._embed(torch.from_numpy(inputs.token_ids))
        place_rows(x, inputs)
        for layer in self.layers:
            x = layer(x, rotations, attention[layer.window])
        return x

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size]; an id is embedded by the rank that holds it."""
        if self.ranks.size == 1:
            return torch.embedding(self.embedding, token_ids)
        local = token_ids - self._vocab_part.start
        is_elsewhere = (local < 0) | (local >= len(self.embedding))
        rows = torch.embedding(self.embedding, local.masked_fill(is_elsewhere, 0))
        return self.ranks.sum_(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def select(self, hidden: torch.Tensor, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """The final hidden states of some rows, [num_rows, hidden_size]."""
        return self.norm(hidden.index_select(0, torch.from_numpy(rows)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] for what `select` returned; [num_rows, 0] on the other ranks than the first."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in the type of the model; with several ranks widened, for the way between them."""
        assert self.lm_head is not None
        logits = self.lm_head(hidden)
        return logits if self.ranks.size == 1 else self.ranks.gather_columns(logits.float(), self.config.vocab_size)
