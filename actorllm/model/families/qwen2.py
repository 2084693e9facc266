"""Qwen2 and Qwen2.5: biases on query, key and value; sliding windows on the upper layers where they are switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families.decoder_config import DecoderConfig, positive, qwen_windows


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    windows = qwen_windows(hf, positive(hf, "num_hidden_layers"))
    return DecoderConfig.from_hugging_face(hf, has_qkv_bias=True, windows=windows)
