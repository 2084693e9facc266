"""Phi-3 and Phi-4: Llama whose checkpoints keep query, key and value in one tensor, and gate and up in another (arXiv:2404.14219).

The variants with long contexts (rope type longrope, a partial rotation) have no fused forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families.decoder_config import DecoderConfig, TensorNames, positive

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    window = None if hf.get("sliding_window") is None else positive(hf, "sliding_window")
    return DecoderConfig.from_hugging_face(
        DEFAULTS | dict(hf),
        windows=(window,) * positive(hf, "num_hidden_layers"),
        names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    )
