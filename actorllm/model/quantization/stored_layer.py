"""`StoredLayer`: a linear layer of a checkpoint, and the part of it that a rank reads. The readers of all formats are given one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.grouped import Grouped, nearest
from actorllm.model.weights import Stored, Weights
from actorllm.types.quantization import QuantizedCheckpoint


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """rows and columns: the outputs and inputs that are wanted. bias: of these outputs."""

    weights: Weights
    scheme: QuantizedCheckpoint
    name: str
    out_features: int
    in_features: int
    rows: slice
    columns: slice
    bias: torch.Tensor | None

    @property
    def num_groups(self) -> int:
        """Of inputs that share a scale."""
        return 1 if self.scheme.group is None else self.in_features // self.scheme.group

    def take(self, part: str, *shape: int, **options: Any) -> torch.Tensor:
        """A tensor of the layer. part: what follows its name (".scales"). options: of `Weights.take`."""
        return self.weights.take(self.name + part, *shape, **options)

    def stored(self, part: str) -> Stored | None:
        """What the files say of such a tensor; None: they have none."""
        return self.weights.stored(self.name + part)

    def take_whole(self, part: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in the shape that it has in the files."""
        found = self.stored(part)
        return self.take(part, *(() if found is None else found.shape), dtype=dtype)

    def rounded(self, weight: torch.Tensor) -> LinearWeight:
        """The wanted part of a weight of floats, [out_features, in_features], as integers if these are near enough."""
        return nearest(weight[self.rows, self.columns], self.bias, self.weights.dtype)

    def grouped(self, weight: Grouped) -> LinearWeight:
        """The wanted part of a weight in groups."""
        return weight.part(self.rows, self.columns, self.bias, self.weights.dtype)
