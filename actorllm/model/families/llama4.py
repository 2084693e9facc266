"""Llama 4, its text alone: attention in chunks, but for some layers that see all and do not rotate; experts read scaled inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import (
    DecoderConfig,
    ExpertShape,
    TensorNames,
    layer_types,
    number,
    positive,
)
from actorllm.model.families.expert_shape import expert_shape

DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
}
PARTS: dict[str, Any] = {
    "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": "feed_forward.down_proj",
}
BESIDE = ("vision_model.", "multi_modal_projector.")
"""Tensors of the tower for images."""


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    text, names = hf.get("text_config"), TensorNames(**PARTS)
    if isinstance(text, Mapping):  # beside a tower for images
        names = TensorNames(model="language_model.model", head="language_model.lm_head", beside=BESIDE, **PARTS)
        hf = {**hf, **text}
    hf = DEFAULTS | {key: value for key, value in hf.items() if value is not None or key == "attention_chunk_size"}
    num_layers = positive(hf, "num_hidden_layers")
    rotated = rotated_layers(hf, num_layers)
    size = None if hf["attention_chunk_size"] is None else positive(hf, "attention_chunk_size")
    windows = chunks(hf, rotated, size)
    has_bias = bool(hf.get("attention_bias", False))
    growth = number(hf, "floor_scale", least=1), number(hf, "attn_scale")
    return DecoderConfig.from_hugging_face(
        {**hf, "intermediate_size": positive(hf, "intermediate_size_mlp")},
        names=names,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_adjacent_pairs=True,
        qk_norm="plain" if hf["use_qk_norm"] else "none",
        rotated=rotated,
        windows=windows,
        has_chunks=any(windows),
        query_growth=growth if hf["attn_temperature_tuning"] and not all(rotated) else None,
        experts=experts_of(hf, num_layers),
    )


def rotated_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Raises CorruptModelError."""
    given = hf.get("no_rope_layers") or [
        (i + 1) % positive(hf, "no_rope_layer_interval") != 0 for i in range(num_layers)
    ]
    if not isinstance(given, list) or len(given) < num_layers or not all(one in (0, 1) for one in given):
        raise CorruptModelError(
            f"config.json: no_rope_layers is {given!r:.80}, a list of 0 and 1 is needed, one for each of {num_layers} layers"
        )
    return tuple(map(bool, given[:num_layers]))


def chunks(hf: Mapping[str, Any], rotated: tuple[bool, ...], size: int | None) -> tuple[int | None, ...]:
    """By layer. size: of a chunk. Raises ModelError."""
    if hf.get("layer_types") is None:
        return tuple(size if one else None for one in rotated)
    types = layer_types(hf["layer_types"], len(rotated))
    unknown = set(types) - {"full_attention", "chunked_attention"}
    if unknown:
        raise UnsupportedModelError(f"attention of type {sorted(unknown)[0]!r} is not supported")
    if size is None and "chunked_attention" in types:
        raise CorruptModelError("config.json: attention_chunk_size is missing, and layer_types has 'chunked_attention'")
    return tuple(size if kind == "chunked_attention" else None for kind in types)


def experts_of(hf: Mapping[str, Any], num_layers: int) -> ExpertShape | None:
    """Raises CorruptModelError."""
    step, given = positive(hf, "interleave_moe_layer_step"), hf.get("moe_layers")
    if given is None:
        given = list(range(step - 1, num_layers, step))
    if not isinstance(given, list) or not all(isinstance(one, int) for one in given):
        raise CorruptModelError(f"config.json: moe_layers is {given!r:.80}, a list of numbers of layers is needed")
    layers = tuple(i in given for i in range(num_layers))
    if not any(layers):
        return None
    return expert_shape(
        hf,
        "num_local_experts",
        "intermediate_size",
        layers=layers,
        router="feed_forward.router",
        experts="feed_forward.experts",
        gate_up=("gate_up_proj",),
        is_stacked=True,
        has_halves=True,
        has_inputs_first=True,
        suffix="",
        scoring="inputs",
        shared_size=positive(hf, "intermediate_size"),
        shared="feed_forward.shared_expert",
        shared_names=(("gate_proj", "up_proj"), "down_proj"),
    )
