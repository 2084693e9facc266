"""Llama 1 to 3.x and what shares its code (SmolLM2, TinyLlama ...): grouped heads, optional biases, tied or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families.decoder_config import DecoderConfig


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    has_attention_bias = bool(hf.get("attention_bias", False))
    return DecoderConfig.from_hugging_face(
        hf,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=bool(hf.get("mlp_bias", False)),
    )
