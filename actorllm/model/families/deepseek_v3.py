"""DeepSeek V3 and R1 (arXiv:2412.19437), and Kimi K2: latent attention, and experts that a sigmoid scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families import deepseek_v2
from actorllm.model.families.decoder_config import DecoderConfig

DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    return deepseek_v2.latent_decoder(
        hf,
        is_interleaved=bool(hf.get("rope_interleave", True)),
        scoring="sigmoid",
        normalizes=bool(hf["norm_topk_prob"]),
        **deepseek_v2.groups(hf, least=2),
    )
