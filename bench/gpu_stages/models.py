"""The five models of the benchmark, by their shapes, and the least time that a step of them can take.

The limit of a step is the time to read what it must read (weights once, keys and values of the context) or to do its
arithmetic, whichever is longer, part by part. Bandwidth and matrix throughput are those that stage `ceilings` measured on this
machine, so that a share of the limit says something about us and not about the data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama kind in bfloat16."""

    name: str
    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    has_qk_norm: bool = False
    has_bias: bool = False
    is_tied: bool = True

    @property
    def linears(self) -> list[tuple[str, int, int]]:
        """Name, outputs and inputs of the products of one layer; gate and up are one."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            ("qkv", q + 2 * kv, self.hidden),
            ("o", self.hidden, q),
            ("gate_up", 2 * self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
        ]

    @property
    def num_layer_weights(self) -> int:
        return self.layers * sum(outputs * inputs for _, outputs, inputs in self.linears)

    @property
    def weight_bytes(self) -> int:
        """What a decode step reads of weights: the layers and the head."""
        return 2 * (self.num_layer_weights + self.vocab * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def decode_limit_s(self, batch: int, context: int, bandwidth: float, flops: float) -> float:
        """bandwidth: bytes/s; flops: of bfloat16 products."""
        weights = self.num_layer_weights + self.vocab * self.hidden
        kv = batch * context * self.kv_bytes_per_token / bandwidth
        return max(2 * weights / bandwidth, 2 * weights * batch / flops) + max(
            kv, 4 * batch * context * self.heads * self.head_dim * self.layers / flops
        )

    def prefill_flops(self, num_tokens: int) -> float:
        """Of a prompt from its beginning, the head once."""
        attention = 4 * self.layers * self.heads * self.head_dim * num_tokens / 2
        return num_tokens * (2 * self.num_layer_weights + attention) + 2 * self.vocab * self.hidden

    def config(self) -> dict[str, Any]:
        """For `transformers.AutoConfig.for_model`."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": self.is_tied,
        }


MODELS = {
    shape.name: shape
    for shape in (
        Shape("qwen3-0.6b", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936, has_qk_norm=True),
        Shape("llama-3.2-1b", "llama", 2048, 16, 32, 8, 64, 8192, 128256),
        Shape("qwen2.5-1.5b", "qwen2", 1536, 28, 12, 2, 128, 8960, 151936, has_bias=True),
        Shape("qwen3-8b", "qwen3", 4096, 36, 32, 8, 128, 12288, 151936, has_qk_norm=True, is_tied=False),
        Shape("llama-3.1-8b", "llama", 4096, 32, 32, 8, 128, 14336, 128256, is_tied=False),
    )
}

TINY = {
    shape.name: shape
    for shape in (
        Shape("tiny-qwen3", "qwen3", 64, 2, 4, 2, 32, 96, 600, has_qk_norm=True),
        Shape("tiny-llama", "llama", 64, 2, 4, 2, 32, 96, 600, is_tied=False),
    )
}
"""Those of a walk through the script."""
