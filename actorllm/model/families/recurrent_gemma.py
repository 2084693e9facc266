"""RecurrentGemma (arXiv:2404.07839): two layers of real-gated linear recurrent units, then one that attends to a window.

As in Gemma, norms multiply by 1 + weight, embeddings are scaled, and the head is the embedding. Logits are capped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, Mixer, TensorNames, number, partial_rope, positive
from actorllm.model.families.recurrent_shapes import RgLruShape

DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_window_size": 2048,
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "block_types": ["recurrent", "recurrent", "attention"],
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MIXERS: dict[str, Mixer] = {"recurrent": "recurrent", "attention": "attention"}
ROTARY_SHARE = 0.5
NAMES = TensorNames(
    final_norm="final_norm",
    qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
    output="temporal_block.o_proj",
    gate_up=("mlp_block.gate_proj", "mlp_block.up_proj"),
    down="mlp_block.down_proj",
    input_norm="temporal_pre_norm",
    mlp_norm="channel_pre_norm",
    norm_offset=1.0,
)


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    hf["hidden_act"] = hf["hidden_activation"]
    if hf["hidden_act"] != "gelu_pytorch_tanh":  # the gate of recurrent layers knows no other
        raise UnsupportedModelError(
            f"hidden_activation={hf['hidden_act']!r:.80} is not supported; only 'gelu_pytorch_tanh' is"
        )
    hidden_size, num_layers = positive(hf, "hidden_size"), positive(hf, "num_hidden_layers")
    inner = positive(hf, "intermediate_size")
    if inner % 2:
        raise CorruptModelError(
            f"config.json: intermediate_size is {inner}, an even number is needed: gate and up are half of it"
        )
    rope, share = partial_rope(hf, ROTARY_SHARE)
    found = mixers(hf["block_types"], num_layers)
    return DecoderConfig.from_hugging_face(
        {**hf, "intermediate_size": inner // 2, "head_dim": None},  # which is what its heads share
        names=NAMES,
        rope=rope,
        rotary_share=share,
        has_qkv_bias=bool(hf.get("attention_bias", False)),
        has_output_bias=True,
        has_mlp_bias=True,
        windows=(positive(hf, "attention_window_size"),) * num_layers,
        # A constant of the model that its authors keep in bfloat16.
        embedding_scale=float(torch.tensor(hidden_size**0.5, dtype=torch.bfloat16)),
        scales_given_rows=True,
        logits_cap=number(hf, "logits_soft_cap", least=1e-3),
        recurrent=RgLruShape(
            num_channels=positive(hf, "lru_width", hidden_size),
            num_blocks=positive(hf, "num_attention_heads"),
            kernel_size=positive(hf, "conv1d_width"),
        ),
        mixers=found,
    )


def mixers(types: Any, num_layers: int) -> tuple[Mixer, ...]:
    """By layer. types: of the first layers, which repeat. Raises ModelError."""
    if not isinstance(types, list | tuple) or not types or not all(isinstance(kind, str) for kind in types):
        raise CorruptModelError(f"config.json: block_types is {types!r:.80}, a list of names is needed")
    unknown = set(types) - set(MIXERS)
    if unknown:
        raise UnsupportedModelError(f"layers of type {sorted(unknown)[0]!r:.80} are not supported")
    found = tuple(MIXERS[types[i % len(types)]] for i in range(num_layers))
    if "recurrent" not in found:
        raise UnsupportedModelError("a model of this architecture without recurrent layers is not supported")
    return found
