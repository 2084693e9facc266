"""Checkpoints of the tiny model, for what reads weights again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model.cuda.twins import TINY


def saved(path: Path, seed: int, **differences: Any) -> Path:
    """A tiny model with random weights."""
    torch.manual_seed(seed)
    shape = TINY | differences
    (architecture,) = shape["architectures"]
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**shape)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.randn_like(parameter)).add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(shape))
    return path
