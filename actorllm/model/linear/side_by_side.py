"""Layers that read the same input, in different forms: each computes its own outputs.

A checkpoint may give query and key 4 bits and value 6, or leave one of them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch

from actorllm.model.linear import Linear, LinearWeight


class SideBySide(LinearWeight):
    """The concatenation of the outputs of its parts."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[LinearWeight]) -> None:
        """parts: of the same in_features."""
        super().__init__(
            sum(part.out_features for part in parts), parts[0].in_features, sum(part.num_bytes for part in parts)
        )
        self.parts = tuple(parts)

    @classmethod
    def fused(cls, parts: Sequence[Any]) -> Self:
        return cls(parts)

    def reordered(self, outputs: torch.Tensor) -> Self:
        """outputs: an order that leaves every output within its part, as rotations of heads do."""
        ends = accumulate((part.out_features for part in self.parts), initial=0)
        return type(self)(
            [
                part.reordered(outputs[start:end] - start)
                for part, (start, end) in zip(self.parts, pairwise(ends), strict=True)
            ]
        )

    def without_bias(self) -> Self:
        return type(self)([part.without_bias() for part in self.parts])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


class SideBySideLinear(Linear):
    """`SideBySide`, each part as a backend computes it."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__(
            sum(part.out_features for part in parts), parts[0].in_features, sum(part.num_bytes for part in parts)
        )
        self.parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


def side_by_side(parts: Sequence[LinearWeight]) -> LinearWeight:
    """One weight of several: neighbours of one form become one product, others stay apart."""
    runs: list[list[Any]] = []
    for part in parts:
        if runs and runs[-1][-1].joins(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    made: list[LinearWeight] = [type(run[0]).fused(run) for run in runs]
    return made[0] if len(made) == 1 else SideBySide(made)
