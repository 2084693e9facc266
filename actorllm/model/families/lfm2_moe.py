"""LFM2 with experts: the first layers have one MLP each, the others experts that a sigmoid scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import UnsupportedModelError
from actorllm.model.families import lfm2
from actorllm.model.families.decoder_config import DecoderConfig, number, positive
from actorllm.model.families.expert_shape import expert_shape

DEFAULTS: dict[str, Any] = {
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = lfm2.DEFAULTS | DEFAULTS | dict(hf) | {"block_auto_adjust_ff_dim": False}
    if not hf["use_expert_bias"]:
        raise UnsupportedModelError("use_expert_bias=False is not supported for this architecture")
    num_layers = positive(hf, "num_hidden_layers")
    num_dense = number(hf, "num_dense_layers", least=0)
    layers = tuple(i >= num_dense for i in range(num_layers))
    experts = expert_shape(
        hf,
        "num_experts",
        "moe_intermediate_size",
        layers=layers,
        router="feed_forward.gate",
        experts="feed_forward.experts",
        gate_up=("w1", "w3"),
        down="w2",
        scoring="sigmoid",
        correction="feed_forward.expert_bias",
        scale=number(hf, "routed_scaling_factor"),
    )
    return lfm2.decoder_config(hf, experts if any(layers) else None)
