"""A weight of plain numbers, one for each pair of output and input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from actorllm.model.linear import LinearPart, LinearWeight
from actorllm.model.weights import Weights


class Dense(LinearWeight):
    """See the module docstring."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], weight.numel() * weight.element_size())
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        return cls(weight, bias)

    @classmethod
    def head_of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """As any other layer."""
        return cls.of(weight, bias)

    @classmethod
    def sharded(cls, weights: Weights, part: LinearPart) -> Self:
        return cls(part.weight(weights).contiguous(), part.bias(weights))

    @classmethod
    def fused(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(joined([part.weight for part in parts]), torch.cat(biases) if biases else None)

    def reordered(self, outputs: torch.Tensor) -> Self:
        # Whole rows, which indexing would copy number by number.
        return type(self)(self.weight.index_select(0, outputs), None if self.bias is None else self.bias[outputs])

    def without_bias(self) -> Self:
        return type(self)(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of several matrices, one below the other: a view where they lie so in memory, as those of an update often do."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        is_next = (
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.storage_offset() == end
            and part.is_contiguous()
            and (part.dtype, part.shape[1]) == (first.dtype, first.shape[1])
        )
        if not is_next:
            return torch.cat(list(parts))
        end += part.numel()
    return first.as_strided((sum(len(part) for part in parts), first.shape[1]), first.stride())
