"""Folders of models with random weights: the files hold the tensors that a family reads, by the names that it has for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from actorllm.model.cpu.decoder import Decoder
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.registry import decoder_config
from actorllm.model.weights import DummyWeights

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
LLAMA: dict[str, Any] = TEXT | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "dtype": "float32",
    "text_config": TEXT | {"intermediate_size_mlp": 96, "num_local_experts": 2, "interleave_moe_layer_step": 2},
}
"""Beside a tower for images, so that all names have a prefix."""


class Kept(DummyWeights):
    """What was drawn is in `tensors`."""

    def __init__(self) -> None:
        super().__init__(0, torch.float32)
        self.tensors: dict[str, torch.Tensor] = {}

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.tensors.setdefault(name, super()._draw(name, shape))


def save_drawn(folder: Path, tree: dict[str, Any], **beside: torch.Tensor) -> DecoderConfig:
    """tree: of config.json. beside: further tensors of the file. Returns the shape of the model."""
    plan = decoder_config(tree["architectures"][0], tree)
    weights = Kept()
    Decoder(plan, weights, 64)
    (folder / "config.json").write_text(json.dumps(tree))
    save_file(weights.tensors | beside, folder / "model.safetensors", {"format": "pt"})
    return plan
