"""OLMo 2: norms on what attention and MLP add instead of on what they read, and over all query and all key heads together
(arXiv:2501.00656)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families.decoder_config import DecoderConfig

DEFAULTS = {"rms_norm_eps": 1e-5}


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    has_attention_bias = bool(hf.get("attention_bias", False))
    return DecoderConfig.from_hugging_face(
        DEFAULTS | dict(hf),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        qk_norm="all_heads",
        norms_inputs=False,
        norms_outputs=True,
    )
