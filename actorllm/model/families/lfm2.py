"""LFM2 (arXiv:2511.23404): most layers are short convolutions between two gates, the others attend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import (
    DecoderConfig,
    Mixer,
    TensorNames,
    layer_types,
    number,
    positive,
    rope_parameters,
    rope_tree,
)
from actorllm.model.families.recurrent_shapes import ShortConvShape

DEFAULTS: dict[str, Any] = {
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "max_position_embeddings": 128_000,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
ROPE_THETA = 1_000_000.0
MIXERS: dict[str, Mixer] = {"conv": "recurrent", "full_attention": "attention"}
NAMES = TensorNames(
    final_norm="embedding_norm",
    output="self_attn.out_proj",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    input_norm="operator_norm",
    mlp_norm="ffn_norm",
)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    rope = {"rope_theta": hf.get("rope_theta") or ROPE_THETA} | rope_tree(hf)
    return DecoderConfig.from_hugging_face(
        {
            **hf,
            "intermediate_size": inner_size(hf),
            "tie_word_embeddings": hf.get("tie_embedding", hf.get("tie_word_embeddings", True)),
        },
        names=NAMES,
        rms_norm_eps=number(hf, "norm_eps", least=0),
        rope=rope_parameters({"rope_parameters": rope}),
        qk_norm="head",
        recurrent=ShortConvShape(
            num_channels=positive(hf, "hidden_size"),
            kernel_size=positive(hf, "conv_L_cache"),
            has_bias=bool(hf.get("conv_bias", False)),
        ),
        mixers=mixers(hf),
    )


def inner_size(hf: Mapping[str, Any]) -> int:
    """Of the MLP, which some files say only roughly."""
    size = positive(hf, "block_ff_dim", hf.get("intermediate_size"))
    if not hf["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if hf["block_ffn_dim_multiplier"] is None:
        return size
    multiple = positive(hf, "block_multiple_of")
    return -(-int(number(hf, "block_ffn_dim_multiplier", least=0) * size) // multiple) * multiple


def mixers(hf: Mapping[str, Any]) -> tuple[Mixer, ...]:
    """By layer. Raises ModelError."""
    num_layers = positive(hf, "num_hidden_layers")
    attends = hf.get("full_attn_idxs")
    if attends is not None and not (isinstance(attends, list) and all(isinstance(i, int) for i in attends)):
        raise CorruptModelError(
            f"config.json: full_attn_idxs is {attends!r:.80}, a list of numbers of layers is needed"
        )
    every = range(num_layers) if attends is None else attends
    types = hf.get("layer_types") or ["full_attention" if i in every else "conv" for i in range(num_layers)]
    unknown = set(layer_types(types, num_layers)) - set(MIXERS)
    if unknown:
        raise UnsupportedModelError(f"layers of type {sorted(unknown)[0]!r:.80} are not supported")
    found = tuple(MIXERS[kind] for kind in types)
    if "recurrent" not in found:
        raise UnsupportedModelError("a model of this architecture without convolutions is not supported")
    return found
