"""Folders with weights like the storyteller's, and engines that are built with them from the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actorllm import LLM, SamplingParams
from actorllm.config import BUNDLED_MODELS

STORYTELLER = Path(BUNDLED_MODELS["storyteller"])
PROMPT = "Once upon a time there was a fox who lived in a forest, and every morning"
ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 16, "max_model_len": 256}


def greedy(num_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)


def changed(seed: int, size: float = 0.1) -> dict[str, torch.Tensor]:
    """The storyteller's weights, each a little different. seed 0: the same."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = load_file(STORYTELLER / "model.safetensors")
    if not seed:
        return tensors
    return {
        name: (value.float() * (1 + size * torch.randn(value.shape, generator=generator))).to(value.dtype)
        for name, value in tensors.items()
    }


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A whole model with these weights."""
    shutil.copytree(STORYTELLER, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def stream_of_fresh(folder: Path | str, prompt: Any = PROMPT, num_tokens: int = 24, **engine: Any) -> list[int]:
    """What an engine says that has had these weights from its start."""
    with LLM(str(folder), topology="inline", **(ENGINE | engine)) as llm:
        (output,) = llm.generate(prompt, greedy(num_tokens), use_tqdm=False)
        return output.outputs[0].token_ids
