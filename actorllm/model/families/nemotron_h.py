"""Nemotron-H (arXiv:2504.03624): each layer is a state-space mixer, attention without rotation, an MLP or experts, and no more.

Step sizes have the limits of `time_step_limit`, in prompts as in decode. The module of transformers takes `time_step_min` as one
in prompts alone, so that a prompt and the same tokens one by one differ there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families import deepseek_v2
from actorllm.model.families.decoder_config import (
    DecoderConfig,
    ExpertShape,
    Mixer,
    TensorNames,
    layer_types,
    number,
    positive,
)
from actorllm.model.families.expert_shape import expert_shape
from actorllm.model.families.mamba2 import limits
from actorllm.model.families.recurrent_shapes import Mamba2Shape

DEFAULTS: dict[str, Any] = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "head_dim": 128,
    "intermediate_size": 21_504,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
KINDS = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
"""Letters of `hybrid_override_pattern`, and older names of types."""
MIXERS: dict[str, Mixer] = {
    "linear_attention": "recurrent",
    "full_attention": "attention",
    "mlp": "none",
    "moe": "none",
}
RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
"""Other names of keys."""
NAMES = TensorNames(
    model="backbone",
    embedding="embeddings",
    final_norm="norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    input_norm="norm",
    mlp_norm="norm",
    beside=("mtp.",),
)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | {RENAMED.get(key, key): value for key, value in hf.items()}
    if hf.get("mlp_hidden_act", "relu2") != "relu2":
        raise UnsupportedModelError(f"mlp_hidden_act={hf['mlp_hidden_act']!r:.80} is not supported; only 'relu2' is")
    if hf.get("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"mamba_hidden_act={hf['mamba_hidden_act']!r:.80} is not supported; only 'silu' is")
    types = types_of(hf)
    mixers = tuple(MIXERS[kind] for kind in types)
    if "recurrent" not in mixers:
        raise UnsupportedModelError("a model of this architecture without state-space layers is not supported")
    eps = number(hf, "layer_norm_epsilon", least=0)
    shape = Mamba2Shape(
        num_heads=positive(hf, "mamba_num_heads"),
        head_dim=positive(hf, "mamba_head_dim"),
        num_groups=positive(hf, "n_groups"),
        state_size=positive(hf, "ssm_state_size"),
        kernel_size=positive(hf, "conv_kernel"),
        has_conv_bias=bool(hf.get("use_conv_bias", True)),
        has_bias=bool(hf.get("use_bias", False)),
        eps=eps,
        limits=limits(hf.get("time_step_limit")),
    )
    return DecoderConfig.from_hugging_face(
        {**hf, "num_hidden_layers": len(types), "hidden_act": "silu"},
        names=NAMES,
        ties_embeddings=False,  # whatever tie_word_embeddings says, as in transformers
        rope={"rope_theta": 10_000.0},
        rotates=False,
        rms_norm_eps=eps,
        has_mlp_bias=bool(hf.get("mlp_bias", False)),
        activation="relu2",
        has_gate=False,
        experts=experts_of(hf, types),
        recurrent=shape,
        mixers=mixers,
        mlps=tuple(mixer == "none" for mixer in mixers),
    )


def types_of(hf: Mapping[str, Any]) -> list[str]:
    """By layer. Raises ModelError."""
    given = hf.get("layers_block_type") or hf.get("layer_types") or hf.get("hybrid_override_pattern")
    if isinstance(given, str):
        given = list(given)
    if not isinstance(given, list) or not given:
        raise CorruptModelError(
            f"config.json: layers_block_type is {given!r:.80}, a list of types is needed, or hybrid_override_pattern"
        )
    types = [KINDS.get(kind, kind) for kind in layer_types(given, len(given))]
    unknown = set(types) - set(MIXERS)
    if unknown:
        raise UnsupportedModelError(f"layers of type {sorted(unknown)[0]!r:.80} are not supported")
    return types


def experts_of(hf: Mapping[str, Any], types: list[str]) -> ExpertShape | None:
    """Raises ModelError."""
    if "moe" not in types:
        return None
    if hf.get("mlp_bias"):
        raise UnsupportedModelError("mlp_bias=True is not supported for this architecture with experts")
    return expert_shape(
        {**hf, "num_hidden_layers": len(types)},
        "n_routed_experts",
        "moe_intermediate_size",
        layers=tuple(kind == "moe" for kind in types),
        router="mixer.gate",
        experts="mixer.experts",
        gate_up=("up_proj",),
        has_gate=False,
        scoring="sigmoid",
        correction="mixer.gate.e_score_correction_bias",
        scale=number(hf, "routed_scaling_factor"),
        shared_size=positive(hf, "moe_shared_expert_intermediate_size"),
        shared="mixer.shared_experts",
        latent_size=None if hf.get("moe_latent_size") is None else positive(hf, "moe_latent_size"),
        latents=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        **deepseek_v2.groups(hf, least=2),
    )
