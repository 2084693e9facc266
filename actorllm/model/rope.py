"""Rotary embeddings: which angle turns each pair of a head's dimensions, by position (Su et al., arXiv:2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

ROPE_TYPES = ("default", "linear", "llama3")


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any], max_position_embeddings: int) -> torch.Tensor:
    """float32 [head_dim / 2] for the `rope_parameters` of a config.json: types default, linear and llama3."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope["rope_theta"])
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return _llama3(frequencies, rope, max_position_embeddings)
    raise ValueError(f"rope type {kind!r}")


def _llama3(frequencies: torch.Tensor, rope: Mapping[str, Any], max_position_embeddings: int) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    old_length = rope.get("original_max_position_embeddings") or max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > old_length / low, frequencies / factor, frequencies)
    smooth = (old_length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = (wavelengths >= old_length / high) & (wavelengths <= old_length / low)
    return torch.where(is_between, blended, stretched)


def rotation_angles(
    head_dim: int, rope: Mapping[str, Any], max_position_embeddings: int, max_positions: int
) -> torch.Tensor:
    """float32 [max_positions, head_dim / 2]."""
    frequencies = inverse_frequencies(head_dim, rope, max_position_embeddings)
    # Products in float32 as in transformers: at large positions another rounding would be another model.
    return torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
