"""LoRA adapters in a model: which layers they adapt, their tensors, and their products beside those of the base.

`AdaptedLayer` says what of a checkpoint's layer a rank computes, and where (`families.tensors` makes them). `reading` makes
tensors of a folder. `slots` holds those that rows of a step may use. The scheduler decides which these are
(`actorllm.scheduling.residency`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

LowRank: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Of one target: A [rank, inputs of this rank], and B transposed and scaled [rank, outputs of this rank]."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLayer:
    """A linear layer of the checkpoint, and the part of it that one product of this rank computes."""

    name: str
    """Without '.weight'."""
    out_features: int
    in_features: int
    """Of the whole layer."""
    rows: torch.Tensor
    """int64: its outputs that are computed here, in the order of the product."""
    columns: slice
    """Its inputs that are computed here."""
    outputs: slice
    """Where the rows stand in the output of the product."""

    def reordered(self, order: torch.Tensor) -> AdaptedLayer:
        """order: of all outputs of the product; those of one target stay together."""
        return replace(self, rows=self.rows[order[self.outputs] - self.outputs.start])


class Slots(ABC):
    """Room for the adapters of the rows of a step, in every adapted product of a model; each backend has its own."""

    fills_beside_steps = False
    """`put` may be called on another thread while steps are computed with other slots."""

    def __init__(self, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        """dtype: of the products."""
        self.num_slots, self.max_rank, self.dtype = num_slots, max_rank, dtype
        self.targets: dict[str, AdaptedLayer] = {}
        """All that can be adapted, by name."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of all slots in all products."""

    @abstractmethod
    def put(self, slot: int, tensors: Mapping[str, LowRank]) -> None:
        """Let a slot, 1 to num_slots, hold this adapter (`reading.read_adapter`)."""
