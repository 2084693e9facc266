"""The five models of the benchmark, by their shapes, and the least time that a step of them can take.

The limit of a step is the time to read what it must read (weights once, keys and values of the context) or to do its
arithmetic, whichever is longer, part by part. Bandwidth and matrix throughput are those that stage `ceilings` measured on this
machine, so that a share of the limit says something about us and not about the data sheet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actorllm.bundled import shapes


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama kind in bfloat16."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    has_qk_norm: bool = False
    has_bias: bool = False

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
        """A config.json of this shape."""
        kind = "qwen3" if self.has_qk_norm else "qwen2" if self.has_bias else "llama"
        return {
            "architectures": [f"{kind.capitalize()}ForCausalLM"],
            "model_type": kind,
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        }

    def write(self, folder: Path) -> Path:
        """The folder, with its config.json."""
        (folder / "config.json").write_text(json.dumps(self.config()))
        return folder

    @classmethod
    def of(cls, name: str) -> Shape:
        """One of those that the package knows (`actorllm.bundled.shapes`), whose weights `load_format="dummy"` draws."""
        config = json.loads((shapes.FOLDER / name / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            name,
            config["hidden_size"],
            config["num_hidden_layers"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim", config["hidden_size"] // heads),
            config["intermediate_size"],
            config["vocab_size"],
            has_qk_norm=config["model_type"] == "qwen3",
            has_bias=config["model_type"] == "qwen2",
        )


MODELS = {name: Shape.of(name) for name in ("Qwen3-0.6B", "Llama-3.2-1B", "Qwen2.5-1.5B", "Qwen3-8B", "Llama-3.1-8B")}

TINY = {
    shape.name: shape
    for shape in (
        Shape("tiny-qwen3", 64, 2, 4, 2, 32, 96, 600, has_qk_norm=True),
        Shape("tiny-llama", 64, 2, 4, 2, 32, 96, 600),
    )
}
"""Those of a walk through the script."""
