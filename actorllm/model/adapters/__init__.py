"""LoRA adapters in a model: which layers they adapt, their tensors, and their products beside those of the base.

`AdaptedLayer` says what of a checkpoint's layer a rank computes, and where (`families.tensors` makes them). `reading` makes
tensors of a folder. `slots` holds those that rows of a step may use. The scheduler decides which these are
(`actorllm.scheduling.residency`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


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
