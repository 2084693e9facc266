"""A small gpt-oss whose experts are in mxfp4, and the same with the numbers that transformers reads of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.model.hf.decoders import save


def save_mxfp4(tmp_path: Path) -> tuple[Path, Path]:
    """The folders: in mxfp4, and in floats."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "sliding_window": 24,
        "head_dim": 32,
        "vocab_size": 300,
    }
    save("gpt-oss", tmp_path, **shape)
    generator = torch.Generator().manual_seed(1)
    packed = load_file(tmp_path / "model.safetensors")
    exact = dict(packed)
    for layer in range(2):
        for name, inputs in (("gate_up_proj", 64), ("down_proj", 96)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            count, _, outputs = packed.pop(key).shape
            blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 126, blocks.shape[:3], dtype=torch.uint8, generator=generator)
            packed[f"{key}_blocks"], packed[f"{key}_scales"] = blocks, scales
            exact[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    folders = []
    for kind, tensors in (("packed", packed), ("exact", exact)):
        folder = tmp_path / kind
        folder.mkdir()
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"quantization_config": {"quant_method": "mxfp4"}} if kind == "packed" else {}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        folders.append(folder)
    return folders[0], folders[1]
