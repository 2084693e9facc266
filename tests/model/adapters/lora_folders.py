"""Adapters as peft writes them, with random weights; and the same merged into a model of transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def linear_layers(model: Any, targets: Iterable[str] = LINEAR) -> dict[str, torch.nn.Linear]:
    """The layers of these names, by their whole names."""
    wanted = set(targets)
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in wanted
    }


def write_adapter(
    folder: Path,
    layers: Mapping[str, tuple[int, int]],
    *,
    seed: int = 0,
    size: float = 0.5,
    rename: Mapping[str, str] | None = None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """An adapter of these layers, given as name: (outputs, inputs). Returns what it adds to the weight of each.

    size: of what it adds. settings: fields of adapter_config.json. rename: of tensors, from and to.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
        "init_lora_weights": True,
    } | settings
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}

    def of_pattern(key: str, name: str, default: Any) -> Any:
        ends = [value for end, value in config[key].items() if name == end or name.endswith("." + end)]
        return ends[0] if ends else default

    for name, (outputs, inputs) in layers.items():
        rank = of_pattern("rank_pattern", name, config["r"])
        alpha = of_pattern("alpha_pattern", name, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank, generator=generator) * (size / rank**0.5 / scale)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        deltas[name] = scale * b @ a
    for old, new in (rename or {}).items():
        tensors[new] = tensors.pop(old)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return deltas


def adaptable(model: Any) -> dict[str, tuple[int, int]]:
    """Sizes of all linear layers but for the head, and for those of Mamba between its first and its last one."""
    found = {name: layer for name, layer in model.named_modules() if type(layer) is torch.nn.Linear}
    left_out = [name for name, layer in found.items() if layer is model.get_output_embeddings()]
    left_out += [name for name in found if name.endswith(("x_proj", "dt_proj"))]
    return shapes_of({name: layer for name, layer in found.items() if name not in left_out})


def shapes_of(layers: Mapping[str, torch.nn.Linear]) -> dict[str, tuple[int, int]]:
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def merged(model: Any, deltas: Mapping[str, torch.Tensor]) -> Any:
    """A copy of the model whose weights have the adapter in them."""
    other = copy.deepcopy(model)
    layers = dict(other.named_modules())
    with torch.no_grad():
        for name, delta in deltas.items():
            layers[name].weight.add_(delta.to(layers[name].weight.dtype))
    return other
