"""Weights of 8 bits with one scale for each output, and activations of 8 bits with one scale for each token (W8A8).

A product is a sum of integers, which is exact, times both scales. So a row depends on nothing but itself: its bits are the same
in every batch. `Int8.__call__` states the arithmetic; `onednn.Int8Linear` is the same, fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from actorllm.model.linear import LinearWeight
from actorllm.model.weights import ALL, Weights

LIMIT = 127
"""Codes are at least -LIMIT and at most LIMIT."""

OFFSET = 128
"""Added to the codes of activations: products of unsigned by signed numbers are the ones that processors are fast at."""

SLICE_NUMBERS = 4 << 20
"""Weights that are quantized at a time: in float32 they take 16 MiB beside the codes."""


class Int8(LinearWeight):
    """See the module docstring."""

    __slots__ = ("bias", "change", "codes", "scales")

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """codes: int8 [out_features, in_features]. scales: float32 [out_features]. bias: [out_features]."""
        super().__init__(codes.shape[0], codes.shape[1], codes.numel() + 4 * scales.numel())
        self.codes, self.scales, self.bias = codes, scales, bias
        self.change: float | None = None
        """The root mean square of what rounding has changed, in that of the weight; None: not known, or nothing."""

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """Of a weight of floats, rounded to the nearest code."""
        where = weight.device if weight.is_meta else None
        codes = torch.empty(weight.shape, dtype=torch.int8, device=where)
        scales = torch.empty(weight.shape[0], device=where)
        step = max(1, SLICE_NUMBERS // max(1, weight.shape[1]))
        for start in range(0, weight.shape[0], step):
            rows = weight[start : start + step].float()
            scale = (rows.abs().amax(1) / LIMIT).clamp_min_(torch.finfo(torch.float32).tiny)
            codes[start : start + step] = (rows / scale.unsqueeze(1)).round_()
            scales[start : start + step] = scale
        return cls(codes, scales, bias)

    @classmethod
    def head_of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """As any other layer."""
        return cls.of(weight, bias)

    @classmethod
    def sharded(
        cls,
        weights: Weights,
        name: str,
        out_features: int,
        in_features: int,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        has_bias: bool = False,
    ) -> Self:
        weight = weights.take(f"{name}.weight", out_features, in_features, rows=rows, columns=columns)
        return cls.of(weight, weights.take(f"{name}.bias", out_features, rows=rows) if has_bias else None)

    @classmethod
    def fused(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(biases) if biases else None,
        )

    def reordered(self, outputs: torch.Tensor) -> Self:
        bias = None if self.bias is None else self.bias[outputs]
        return type(self)(self.codes[outputs], self.scales[outputs], bias)

    def without_bias(self) -> Self:
        return type(self)(self.codes, self.scales)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantized(x)
        sums = (codes.double() - OFFSET) @ self.codes.double().T  # integers below 2^53: exact
        return rescaled(sums.float() * self.scales, scales, self.bias, x.dtype)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token of [num_tokens, in_features] as codes plus OFFSET, uint8, and its scale, float32 [num_tokens, 1].

    A token that is not finite has a scale that is not, either, so that its products are not finite.
    """
    exact = x.float()
    scales = exact.abs().amax(1, keepdim=True).div_(LIMIT).clamp_min_(torch.finfo(torch.float32).tiny)
    # Conversion cuts off what is behind the point: with the half this rounds to the nearest.
    return exact.mul(scales.reciprocal()).add_(OFFSET + 0.5).to(torch.uint8), scales


def rescaled(
    products: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """products: float32 [num_tokens, out_features], without the scales of the tokens; changed in place."""
    products.mul_(scales)
    if bias is not None:
        products.add_(bias)
    return products.to(dtype)
