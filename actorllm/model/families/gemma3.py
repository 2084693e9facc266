"""Gemma 3, text only (arXiv:2503.19786).

Four norms a layer, which multiply by 1 + weight, and one on every query and key head; scaled embeddings; gelu in its
approximation by tanh. Most layers see a sliding window, and rotate with another base than those that see everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import UnsupportedModelError
from actorllm.model.families.decoder_config import (
    DecoderConfig,
    TensorNames,
    positive,
    rope_parameters,
    windows_by_layer_type,
)

DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
ROPE_THETA, WINDOW_ROPE_THETA = 1_000_000.0, 10_000.0
WINDOW = 4096
PATTERN = 6
"""Every sixth layer sees everything, where config.json lists no types."""

UNKNOWN = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
"""Switches that no released text model of the family sets."""


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    for name in UNKNOWN:
        if hf.get(name):
            raise UnsupportedModelError(f"{name}={hf[name]!r} is not supported")
    hf = DEFAULTS | dict(hf)
    hf["hidden_act"] = hf["hidden_activation"]
    num_layers = positive(hf, "num_hidden_layers")
    pattern = positive(hf, "sliding_window_pattern", PATTERN)
    types = hf.get("layer_types") or [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)
    ]
    rope, window_rope = ropes(hf)
    has_attention_bias = bool(hf.get("attention_bias", False))
    return DecoderConfig.from_hugging_face(
        hf,
        names=TensorNames(mlp_norm="pre_feedforward_layernorm", norm_offset=1.0),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="head",
        windows=windows_by_layer_type(num_layers, positive(hf, "sliding_window", WINDOW), types),
        rope=rope,
        window_rope=window_rope,
        attention_scale=positive(hf, "query_pre_attn_scalar", 256) ** -0.5,
        norms_outputs=True,
        embedding_scale=positive(hf, "hidden_size") ** 0.5,
    )


def ropes(hf: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the layers that see everything, and of those with a window: as transformers 5 writes them, or the older keys."""
    given = hf.get("rope_parameters") or {}
    unknown = set(given) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"rope_parameters has {sorted(unknown)[0]!r} beside the types of layers")
    full = {"rope_theta": hf.get("rope_theta") or ROPE_THETA} | dict(hf.get("rope_scaling") or {})
    window = {"rope_theta": hf.get("rope_local_base_freq") or WINDOW_ROPE_THETA}
    return (
        rope_parameters({"rope_parameters": full | dict(given.get("full_attention") or {})}),
        rope_parameters({"rope_parameters": window | dict(given.get("sliding_attention") or {})}),
    )
