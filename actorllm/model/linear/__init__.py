"""The one seam for weights: whatever form a linear layer's weight has, a model holds it as a `Linear`.

`LinearWeight` is a weight as a checkpoint has it; `fused` puts several side by side. `Form` says which one the layers of a model
have, and reads a rank's part of each (`sharded`). A backend makes a `Linear` of its own of it, in the layout that is fastest there
(`model.cpu.layers.linear`, `model.cuda.quantized.linear`). A new form of weight is a `LinearWeight`, and what each backend makes
of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch

from actorllm.model.weights import ALL, Weights


class Linear(ABC):
    """x @ weight.T + bias."""

    __slots__ = ("in_features", "num_bytes", "out_features")

    def __init__(self, out_features: int, in_features: int, num_bytes: int) -> None:
        """num_bytes: what one product reads of the weight."""
        self.out_features, self.in_features, self.num_bytes = out_features, in_features, num_bytes

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features]."""


class LinearWeight(Linear):
    """A weight as a checkpoint has it."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def fused(cls, parts: Sequence[Self]) -> Self:
        """One product whose output is the concatenation of the given ones'."""

    def joins(self, other: LinearWeight) -> bool:
        """Whether `fused` can put the other one below this one."""
        return type(self) is type(other)

    @abstractmethod
    def reordered(self, outputs: torch.Tensor) -> Self:
        """The same with its outputs in another order."""

    @abstractmethod
    def without_bias(self) -> Self:
        """The same, which adds nothing."""


class LinearPart(NamedTuple):
    """Which linear layer is read, and which part of it: `Form.sharded`.

    rows, columns: the outputs and inputs that are wanted. has_bias: it has one, which belongs to the outputs.
    """

    name: str
    out_features: int
    in_features: int
    rows: slice = ALL
    columns: slice = ALL
    has_bias: bool = False

    def weight(self, weights: Weights, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of plain numbers. dtype: as of `Weights.take`."""
        shape = self.out_features, self.in_features
        return weights.take(f"{self.name}.weight", *shape, rows=self.rows, columns=self.columns, dtype=dtype)

    def bias(self, weights: Weights) -> torch.Tensor | None:
        return weights.take(f"{self.name}.bias", self.out_features, rows=self.rows) if self.has_bias else None


class Form(Protocol):
    """What the layers of a model are read as: a class of `LinearWeight`, or what chooses one for each layer by its name."""

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """Of a weight of floats that is in memory."""

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """Of the head, where it is in memory: it may be the embedding."""

    def sharded(self, weights: Weights, part: LinearPart) -> LinearWeight:
        """A layer of a checkpoint, or a part of it."""

    def fused(self, parts: Sequence[Any]) -> LinearWeight:
        """As `LinearWeight.fused`; parts: what `sharded` made."""
