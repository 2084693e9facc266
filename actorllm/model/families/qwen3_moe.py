"""Qwen3 with experts: its attention, and many small experts in the place of the MLP (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actorllm.errors import CorruptModelError
from actorllm.model.families import qwen3
from actorllm.model.families.decoder_config import DecoderConfig, positive, qwen_window
from actorllm.model.families.expert_shape import expert_shape


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    num_layers = positive(hf, "num_hidden_layers")
    # transformers 5 writes num_local_experts; the checkpoints of the family have num_experts.
    count = "num_experts" if "num_experts" in hf else "num_local_experts"
    step, dense = positive(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CorruptModelError(f"config.json: mlp_only_layers is {dense!r:.80}, a list is needed")
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    experts = expert_shape(hf, count, "moe_intermediate_size", layers=layers)
    # Other than in the dense models, a window is that of every layer.
    window = qwen_window(hf)
    config = qwen3.decoder_config({key: value for key, value in hf.items() if key != "layer_types"})
    return replace(config, windows=(window,) * num_layers, experts=experts if any(layers) else None)
