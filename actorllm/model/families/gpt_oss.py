"""gpt-oss (arXiv:2508.10925): experts with an activation of their own, attention with sinks, every second layer in a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families.decoder_config import (
    DecoderConfig,
    number,
    positive,
    rope_parameters,
    windows_by_layer_type,
)
from actorllm.model.families.expert_shape import expert_shape
from actorllm.model.rope import ROPE_TYPES, YARN

DEFAULTS = {
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
ROPE = {
    "rope_type": YARN,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    num_layers = positive(hf, "num_hidden_layers")
    types = hf.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_parameters"] = ROPE
    has_bias = bool(hf.get("attention_bias", True))
    experts = expert_shape(
        hf,
        "num_local_experts",
        "intermediate_size",
        normalizes=True,
        router="mlp.router",
        gate_up=("gate_up_proj",),
        is_stacked=True,
        has_bias=True,
        has_router_bias=True,
        swiglu=(number(hf, "swiglu_alpha"), number(hf, "swiglu_limit")),
    )
    return DecoderConfig.from_hugging_face(
        hf,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_sinks=True,
        windows=windows_by_layer_type(num_layers, positive(hf, "sliding_window"), types),
        rope=rope_parameters(hf, (*ROPE_TYPES, YARN)),
        experts=experts,
    )
