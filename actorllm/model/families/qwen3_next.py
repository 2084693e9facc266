"""Qwen3-Next: three layers of linear attention with a gated delta rule, then one that attends, with a gate; many small experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import (
    DecoderConfig,
    ExpertShape,
    TensorNames,
    number,
    partial_rope,
    positive,
)
from actorllm.model.families.expert_shape import expert_shape
from actorllm.model.families.granite_hybrid import mixers
from actorllm.model.families.recurrent_shapes import GatedDeltaShape

DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "max_position_embeddings": 32_768,
}
ROTARY_SHARE = 0.25
INTERVAL = 4
"""Every fourth layer attends, where config.json lists no types."""


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    num_layers = positive(hf, "num_hidden_layers")
    step, dense = positive(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CorruptModelError(f"config.json: mlp_only_layers is {dense!r:.80}, a list is needed")
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    experts = expert_shape(
        hf,
        "num_experts",
        "moe_intermediate_size",
        layers=layers,
        shared_size=positive(hf, "shared_expert_intermediate_size"),
        shared="mlp.shared_expert",
        shared_gate="mlp.shared_expert_gate",
    )
    return hybrid(hf, TensorNames(norm_offset=1.0, beside=("mtp.",)), experts if any(layers) else None)


def hybrid(
    hf: Mapping[str, Any], names: TensorNames, experts: ExpertShape | None, *, is_split: bool = False
) -> DecoderConfig:
    """What Qwen3-Next and Qwen3.5 have alike. is_split: as of the shape of recurrent layers. Raises ModelError."""
    if hf.get("attention_bias"):
        raise UnsupportedModelError("attention_bias=True is not supported for this architecture")
    num_layers = positive(hf, "num_hidden_layers")
    every = positive(hf, "full_attention_interval", INTERVAL)
    types = hf.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
    ]
    rope, share = partial_rope(hf, ROTARY_SHARE)
    return DecoderConfig.from_hugging_face(
        hf,
        names=names,
        rope=rope,
        rotary_share=share,
        qk_norm="head",
        gates_attention=True,
        experts=experts,
        recurrent=GatedDeltaShape(
            num_key_heads=positive(hf, "linear_num_key_heads"),
            num_value_heads=positive(hf, "linear_num_value_heads"),
            key_dim=positive(hf, "linear_key_head_dim"),
            value_dim=positive(hf, "linear_value_head_dim"),
            kernel_size=positive(hf, "linear_conv_kernel_dim"),
            eps=number(hf, "rms_norm_eps", 1e-6, least=0),
            is_split=is_split,
        ),
        mixers=mixers({**hf, "layer_types": types}),
    )
