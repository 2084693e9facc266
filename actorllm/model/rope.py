"""Rotary embeddings: which angle turns each pair of a head's dimensions, by position (Su et al., arXiv:2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

ROPE_TYPES = ("default", "linear", "llama3")
"""That all fused forwards know."""
YARN = "yarn"
"""Its rotations are longer than 1 (`rotation_length`), which a family and a backend must know."""


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any], max_position_embeddings: int) -> torch.Tensor:
    """float32 [head_dim / 2] for the `rope_parameters` of a config.json: ROPE_TYPES and YARN."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope["rope_theta"])
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return _llama3(frequencies, rope, max_position_embeddings)
    if kind == YARN:
        return _yarn(frequencies, rope, max_position_embeddings)
    raise ValueError(f"rope type {kind!r}")


def _yarn(frequencies: torch.Tensor, rope: Mapping[str, Any], max_position_embeddings: int) -> torch.Tensor:
    """Peng et al., arXiv:2309.00071: slow pairs are stretched by `factor`, fast ones kept, those between blended."""
    half, theta = len(frequencies), float(rope["rope_theta"])
    old_length = rope.get("original_max_position_embeddings") or max_position_embeddings

    def pair(num_turns: float) -> float:
        """The pair of dimensions that turns so often within the old length."""
        return 2 * half * math.log(old_length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(float(rope.get("beta_fast") or 32)), pair(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    steepness = (high - low) or 0.001
    is_slow = ((torch.arange(half, dtype=torch.float32) - low) / steepness).clamp(0, 1)
    return frequencies / float(rope["factor"]) * is_slow + frequencies * (1 - is_slow)


def rotation_length(rope: Mapping[str, Any]) -> float:
    """What a rotation multiplies the length of a pair by."""
    if rope.get("rope_type", rope.get("type", "default")) != YARN:
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = float(rope["factor"])

    def length(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return length(float(rope["mscale"])) / length(float(rope["mscale_all_dim"]))
    return length(1.0)


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
