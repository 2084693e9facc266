"""Mistral: Llama with a sliding window on every layer, where config.json sets one (arXiv:2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig, positive


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    if hf.get("layer_types") is not None:
        raise UnsupportedModelError("Mistral with layer_types (alternating attention) is not supported")
    # A missing key means the architecture's own default; null means no window.
    window = None if hf.get("sliding_window", 4096) is None else positive(hf, "sliding_window", 4096)
    return DecoderConfig.from_hugging_face(hf, windows=(window,) * positive(hf, "num_hidden_layers"))
