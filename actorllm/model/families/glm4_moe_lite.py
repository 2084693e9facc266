"""GLM 4.7 Flash: latent attention and experts as of DeepSeek V3, and layers without experts that are named one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families import deepseek_v3
from actorllm.model.families.decoder_config import DecoderConfig, layer_types, positive

DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    num_layers = positive(hf, "num_hidden_layers")
    kinds = hf.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense", *["sparse"] * (num_layers - 1)]
    first = layer_types(kinds, num_layers).count("dense")
    if unknown := set(kinds) - {"dense", "sparse"}:
        raise CorruptModelError(
            f"config.json: mlp_layer_types has {min(unknown)!r:.80}; it must have 'dense' and 'sparse'"
        )
    if kinds[:first] != ["dense"] * first:
        raise UnsupportedModelError("mlp_layer_types with 'dense' behind 'sparse' is not supported")
    return deepseek_v3.decoder_config(DEFAULTS | dict(hf) | {"first_k_dense_replace": first})
