"""Granite 4: most layers are state-space mixers, the others attend without rotation; experts beside an MLP, or that alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, Mixer, TensorNames, layer_types, number, positive
from actorllm.model.families.expert_shape import expert_shape
from actorllm.model.families.mamba2 import limits
from actorllm.model.families.recurrent_shapes import Mamba2Shape

DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
MIXERS: dict[str, Mixer] = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
}
NAMES = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    position = hf.get("position_embedding_type") or "nope"
    if position not in ("nope", "rope"):
        raise UnsupportedModelError(
            f"position_embedding_type={position!r:.80} is not supported; only 'nope' and 'rope' are"
        )
    shared_size = positive(hf, "shared_intermediate_size")
    experts = None
    if hf["num_local_experts"]:
        experts = expert_shape(
            hf,
            "num_local_experts",
            "intermediate_size",
            normalizes=True,
            is_stacked=True,
            has_halves=True,
            router="block_sparse_moe.router.layer",
            experts="block_sparse_moe",
            gate_up=("input_linear",),
            down="output_linear",
            shared_size=shared_size,
            shared="shared_mlp",
            shared_names=(("input_linear",), "output_linear"),
        )
    inner = positive(hf, "mamba_expand") * positive(hf, "hidden_size")
    shape = mamba2_shape(hf, inner)
    has_bias = bool(hf.get("attention_bias"))
    scaling = number(hf, "logits_scaling")
    if not scaling:
        raise CorruptModelError("config.json: logits_scaling is 0, and logits are divided by it")
    return DecoderConfig.from_hugging_face(
        {**hf, "intermediate_size": shared_size},
        names=NAMES,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        rotates=position == "rope",
        attention_scale=number(hf, "attention_multiplier"),
        embedding_scale=number(hf, "embedding_multiplier"),
        scales_given_rows=True,
        residual_scale=number(hf, "residual_multiplier"),
        logits_scale=1 / scaling,
        experts=experts,
        recurrent=shape,
        mixers=mixers(hf),
    )


def mixers(hf: Mapping[str, Any]) -> tuple[Mixer, ...]:
    """By layer. Raises ModelError."""
    num_layers = positive(hf, "num_hidden_layers")
    types = hf.get("layer_types") or ["mamba"] * num_layers
    unknown = set(layer_types(types, num_layers)) - set(MIXERS)
    if unknown:
        raise UnsupportedModelError(f"layers of type {sorted(unknown)[0]!r:.80} are not supported")
    found = tuple(MIXERS[kind] for kind in types)
    if "recurrent" not in found:
        raise UnsupportedModelError("a model of this architecture without state-space layers is not supported")
    return found


def mamba2_shape(hf: Mapping[str, Any], inner: int, **differences: Any) -> Mamba2Shape:
    """Of keys that begin with mamba_. inner: what all heads have together. Raises CorruptModelError."""
    given = hf.get("mamba_d_head")
    common: dict[str, Any] = {
        "num_heads": positive(hf, "mamba_n_heads"),
        "num_groups": positive(hf, "mamba_n_groups"),
        "state_size": positive(hf, "mamba_d_state"),
        "kernel_size": positive(hf, "mamba_d_conv"),
        "has_conv_bias": bool(hf.get("mamba_conv_bias", True)),
        "has_bias": bool(hf.get("mamba_proj_bias", False)),
        "eps": number(hf, "rms_norm_eps", 1e-6, least=0),
        "limits": limits(hf.get("time_step_limit")),
        "prefix": "mamba",
    }
    common["head_dim"] = inner // common["num_heads"] if given in (None, "auto") else positive(hf, "mamba_d_head")
    shape = Mamba2Shape(**(common | differences))
    if shape.inner_size != inner:
        raise CorruptModelError(f"config.json: {shape.num_heads} heads of {shape.head_dim} are not {inner} together")
    return shape
