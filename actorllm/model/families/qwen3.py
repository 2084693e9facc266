"""Qwen3 (dense): RMSNorm on every query and key head instead of Qwen2's biases (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families.decoder_config import DecoderConfig, positive, qwen_windows


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    has_attention_bias = bool(hf.get("attention_bias", False))
    return DecoderConfig.from_hugging_face(
        {"head_dim": 128} | dict(hf),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="head",
        windows=qwen_windows(hf, positive(hf, "num_hidden_layers")),
    )
