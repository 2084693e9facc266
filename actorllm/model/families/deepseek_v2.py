"""DeepSeek V2 (arXiv:2405.04434): latent attention, and experts beside some that every token takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, LatentShape, number, positive, rope_parameters
from actorllm.model.families.expert_shape import expert_shape
from actorllm.model.rope import ROPE_TYPES, YARN

DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
}


MAX_DRAFT_LAYERS = 64


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"topk_method={method!r:.80} is not supported; only 'greedy' and 'group_limited_greedy' are"
        )
    if hf.get("norm_topk_prob"):
        raise UnsupportedModelError("norm_topk_prob=True is not supported for this architecture")
    limits = groups(hf, least=1) if method == "group_limited_greedy" else {}
    return latent_decoder(hf, is_interleaved=True, normalizes=False, **limits)


def groups(hf: Mapping[str, Any], least: int) -> dict[str, int]:
    """The groups of experts that a config.json describes. least: experts that a group must have. Raises CorruptModelError."""
    num_experts, num_groups = positive(hf, "n_routed_experts"), positive(hf, "n_group", 1)
    num_active = positive(hf, "topk_group", 1)
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < least):
        raise CorruptModelError(
            f"config.json: n_routed_experts={num_experts} cannot be shared out among n_group={num_groups} groups of {least} or more"
        )
    if num_active > num_groups:
        raise CorruptModelError(f"config.json: topk_group={num_active} is more than n_group={num_groups}")
    within = num_active * (num_experts // num_groups)
    if positive(hf, "num_experts_per_tok") > within:
        raise CorruptModelError(
            f"config.json: num_experts_per_tok={hf['num_experts_per_tok']} is more than the {within} experts of topk_group="
            f"{num_active} groups"
        )
    return {"num_groups": num_groups, "num_active_groups": num_active}


def latent_decoder(hf: Mapping[str, Any], *, is_interleaved: bool, **experts: Any) -> DecoderConfig:
    """The shape that both versions have alike. experts: fields of `ExpertShape`. Raises ModelError."""
    if hf.get("attention_bias"):
        raise UnsupportedModelError("attention_bias=True is not supported with latent attention")
    if hf.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(f"moe_layer_freq={hf['moe_layer_freq']!r:.80} is not supported; only 1 is")
    num_layers = positive(hf, "num_hidden_layers")
    shape = LatentShape(
        query_rank=None if hf["q_lora_rank"] is None else positive(hf, "q_lora_rank"),
        rank=positive(hf, "kv_lora_rank", 512),
        plain_dim=positive(hf, "qk_nope_head_dim", 128),
        rotary_dim=positive(hf, "qk_rope_head_dim", 64),
        value_dim=positive(hf, "v_head_dim", 128),
        is_interleaved=is_interleaved,
    )
    if shape.rotary_dim % 2:
        raise UnsupportedModelError(f"qk_rope_head_dim={shape.rotary_dim} is odd; rotary embeddings need pairs")
    head_dim = shape.plain_dim + shape.rotary_dim
    rope = rope_parameters(hf, (*ROPE_TYPES, YARN))
    dense = hf["first_k_dense_replace"]
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise CorruptModelError(f"config.json: first_k_dense_replace is {dense!r:.80}, a number of layers is needed")
    layers = tuple(i >= dense for i in range(num_layers))
    mixture = None
    if any(layers):
        size = positive(hf, "moe_intermediate_size")
        num_shared = hf["n_shared_experts"]
        mixture = expert_shape(
            hf,
            "n_routed_experts",
            "moe_intermediate_size",
            layers=layers,
            scale=number(hf, "routed_scaling_factor"),
            shared_size=None if not num_shared else size * positive(hf, "n_shared_experts"),
            **experts,
        )
    drafts = hf.get("num_nextn_predict_layers", hf.get("num_mtp_layers")) or 0
    if isinstance(drafts, bool) or not isinstance(drafts, int) or not 0 <= drafts <= MAX_DRAFT_LAYERS:
        raise CorruptModelError(
            f"config.json: num_nextn_predict_layers is {drafts!r:.80}, a number of layers up to {MAX_DRAFT_LAYERS} is needed"
        )
    heads = positive(hf, "num_attention_heads")
    return DecoderConfig.from_hugging_face(
        {**hf, "num_key_value_heads": heads, "head_dim": head_dim},
        rope=rope,
        attention_scale=head_dim**-0.5 * lengthened(rope) ** 2,
        latent=shape,
        experts=mixture,
        num_draft_layers=drafts,
    )


def lengthened(rope: Mapping[str, Any]) -> float:
    """What long contexts multiply queries and keys by, where `mscale_all_dim` says it."""
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if not weight or not factor or factor <= 1 or rope.get("rope_type", rope.get("type", "default")) == "default":
        return 1.0
    return 0.1 * float(weight) * math.log(float(factor)) + 1.0
