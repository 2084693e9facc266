"""Weights of 4 bits in groups of inputs, and activations of bfloat16 (W4A16).

A weight is (code - 8) * scale + zero, with one scale and one zero for each output and group. Both are rounded to bfloat16, which
is what the products of `int4pack` read. `Int4.__call__` states the arithmetic; a row depends on nothing but itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from actorllm.model.linear import LinearPart, LinearWeight
from actorllm.model.linear.side_by_side import side_by_side
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.per_output import SLICE_NUMBERS
from actorllm.model.weights import Weights
from actorllm.types.quantization import is_head

GROUPS = (128, 64, 32)
"""Inputs that may share a scale."""

MIDDLE = 8
"""The code whose weight is the zero."""

LARGEST = 15
"""Codes are at least 0 and at most this."""


class Int4(LinearWeight):
    """See the module docstring."""

    __slots__ = ("bias", "codes", "group", "order", "scales", "zeros")

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        bias: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        """A weight of these numbers.

        Arguments:
            codes: uint8 [out_features, in_features].
            scales, zeros: [out_features, in_features / group]; group: 32, 64 or 128.
            bias: [out_features].
            order: int64 [in_features]: which input each column of codes is multiplied with; None: the same as its index.
        """
        num_groups = scales.shape[1]
        super().__init__(codes.shape[0], codes.shape[1], codes.numel() // 2 + 4 * scales.numel())
        self.codes, self.bias, self.order, self.group = codes, bias, order, codes.shape[1] // num_groups
        self.scales, self.zeros = scales.bfloat16(), zeros.bfloat16()

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: int = 32) -> Self:
        """Of a weight of floats whose in_features are a multiple of the group, rounded to the nearest code."""
        num_outputs, num_inputs = weight.shape
        where = weight.device
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=where)
        scales = torch.empty(num_outputs, num_inputs // group, dtype=torch.bfloat16, device=where)
        zeros = torch.empty_like(scales)
        step = max(1, SLICE_NUMBERS // max(1, num_inputs))
        for start in range(0, num_outputs, step):
            part = slice(start, start + step)
            rows = weight[part].float().view(-1, num_inputs // group, group)
            low, high = rows.amin(2), rows.amax(2)
            scale = ((high - low) / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny).bfloat16()
            zero = (low + MIDDLE * scale.float()).bfloat16()
            exact = (rows - zero.float().unsqueeze(2)) / scale.float().unsqueeze(2)
            scales[part], zeros[part] = scale, zero
            codes[part] = exact.add_(MIDDLE).round_().clamp_(0, LARGEST).view(-1, num_inputs)
        return cls(codes, scales, zeros, bias)

    def joins(self, other: LinearWeight) -> bool:
        if not isinstance(other, Int4) or other.group != self.group:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    @classmethod
    def fused(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.zeros for part in parts]),
            torch.cat(biases) if biases else None,
            parts[0].order,
        )

    def reordered(self, outputs: torch.Tensor) -> Self:
        bias = None if self.bias is None else self.bias[outputs]
        return type(self)(self.codes[outputs], self.scales[outputs], self.zeros[outputs], bias, self.order)

    def without_bias(self) -> Self:
        return type(self)(self.codes, self.scales, self.zeros, order=self.order)

    def dense(self) -> torch.Tensor:
        """The weight, float32 [out_features, in_features], in the order of the inputs."""
        groups = (self.codes.float() - MIDDLE).view(self.out_features, -1, self.group)
        weight = (groups * self.scales.float().unsqueeze(2) + self.zeros.float().unsqueeze(2)).flatten(1)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        sums = x.bfloat16().double() @ self.dense().double().T
        made = sums.float().bfloat16().to(x.dtype)
        return made if self.bias is None else made + self.bias.to(x.dtype)


@dataclass(frozen=True)
class Int4Weights:
    """The form (`model.linear.Form`) of a model that is rounded while it is loaded.

    The head is of 8 bits: rounded to 4 it would make as much error as all layers together. So are layers whose inputs are no
    multiple of 32.
    """

    group: int = 32

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        group = fitting(self.group, weight.shape[1])
        return Int8.of(weight, bias) if group is None else Int4.of(weight, bias, group=group)

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return Int8.of(weight, bias)

    def sharded(self, weights: Weights, part: LinearPart) -> LinearWeight:
        weight, bias = part.weight(weights), part.bias(weights)
        return self.head_of(weight, bias) if is_head(part.name) else self.of(weight, bias)

    def fused(self, parts: Sequence[Any]) -> LinearWeight:
        return side_by_side(parts)


def fitting(group: int, *sizes: int) -> int | None:
    """The largest group up to this one that divides all sizes; None: not even 32 does."""
    common = math.gcd(group, *sizes)
    return next((one for one in GROUPS if common % one == 0), None)
