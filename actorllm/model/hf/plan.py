"""What the structure of a decoder of transformers says, as `transformers_backend.read_plan` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """The attention of one layer."""

    module: str
    """Path of the module that calls attention."""
    window: int | None
    """A token sees itself and the window - 1 tokens before it. None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersPlan:
    """What a model's structure says; the fields that `DecoderConfig` has too mean the same."""

    config: Any
    """The transformers configuration."""
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The larger of those of keys and values; the smaller is filled up with zeros."""
    layers: tuple[TracedLayer, ...]
    body: str
    """Path of the module that makes hidden states of tokens; what the model does with them is its head."""
    max_positions: int
    scores_positions: bool = False
    """Positions of keys have scores of their own (ALiBi)."""
