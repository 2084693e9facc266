"""Qwen2 and Qwen2.5: biases on query, key and value; sliding windows on the upper layers where they are switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.decoder import DecoderConfig, positive, windows_by_layer_type


def qwen2_config(hf: Mapping[str, Any]) -> DecoderConfig:
    windows = windows_by_layer_type(hf, positive(hf, "num_hidden_layers"))
    return DecoderConfig.from_hugging_face(hf, has_qkv_bias=True, windows=windows)
