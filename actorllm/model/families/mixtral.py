"""Mixtral: Mistral with experts in the place of the MLP; a token takes two of eight (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families.decoder_config import DecoderConfig, positive
from actorllm.model.families.expert_shape import expert_shape

DEFAULTS = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131_072,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    window = None if hf.get("sliding_window") is None else positive(hf, "sliding_window")
    experts = expert_shape(
        hf,
        "num_local_experts",
        "intermediate_size",
        normalizes=True,
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        gate_up=("w1", "w3"),
        down="w2",
    )
    return DecoderConfig.from_hugging_face(hf, windows=(window,) * positive(hf, "num_hidden_layers"), experts=experts)
