"""Which architecture of a config.json is served by which family. A new family is one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actorllm.errors import UnsupportedModelError
from actorllm.model.decoder import DecoderConfig
from actorllm.model.llama import llama_config
from actorllm.model.mistral import mistral_config
from actorllm.model.qwen2 import qwen2_config
from actorllm.model.qwen3 import qwen3_config

FAMILIES: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "LlamaForCausalLM": llama_config,
    "MistralForCausalLM": mistral_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
}


def decoder_config(architecture: str, hf: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes. Raises UnsupportedModelError naming what is missing."""
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture](hf)
