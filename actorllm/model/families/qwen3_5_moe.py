"""Qwen3.5 with experts, its text alone: the layers of Qwen3.5, with many small experts in the place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families import qwen3_5, qwen3_next
from actorllm.model.families.decoder_config import DecoderConfig, positive
from actorllm.model.families.expert_shape import expert_shape

DEFAULTS: dict[str, Any] = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 512,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf, names = qwen3_5.text_of(hf)
    hf = qwen3_next.DEFAULTS | DEFAULTS | hf
    experts = expert_shape(
        hf,
        "num_experts",
        "moe_intermediate_size",
        normalizes=True,
        stacked="gate_up_proj",
        shared_size=positive(hf, "shared_expert_intermediate_size"),
        shared="mlp.shared_expert",
        shared_gate="mlp.shared_expert_gate",
    )
    return qwen3_next.hybrid(hf, names, experts, is_split=True)
