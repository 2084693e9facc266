"""OLMoE: norms over all query and all key heads together, and 64 experts of which a token takes eight (arXiv:2409.02060)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.families.expert_shape import expert_shape

DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    if hf.get("clip_qkv") is not None:
        raise UnsupportedModelError(f"clip_qkv={hf['clip_qkv']!r:.40} is not supported")
    hf = DEFAULTS | dict(hf)
    if "num_local_experts" in hf:  # as transformers 5 writes it
        hf["num_experts"] = hf["num_local_experts"]
    has_attention_bias = bool(hf.get("attention_bias", False))
    return DecoderConfig.from_hugging_face(
        hf,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="all_heads",
        experts=expert_shape(hf, "num_experts", "intermediate_size"),
    )
