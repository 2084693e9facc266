"""`PerOutput`: weights of one code a number, with one scale for each output. `int8.Int8` and `float8.Fp8` say what codes are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch

from actorllm.model.linear import LinearPart, LinearWeight
from actorllm.model.weights import Weights

SLICE_NUMBERS = 4 << 20
"""Weights that are quantized at a time: in float32 they take 16 MiB beside the codes."""


class PerOutput(LinearWeight):
    """A weight is its code times the scale of its output."""

    __slots__ = ("bias", "codes", "scales")

    DTYPE: ClassVar[torch.dtype]
    """Of the codes: one byte each."""
    LARGEST: ClassVar[float]
    """The code of the largest weight of an output."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """codes: DTYPE [out_features, in_features]. scales: float32 [out_features]. bias: [out_features]."""
        super().__init__(codes.shape[0], codes.shape[1], codes.numel() + 4 * scales.numel())
        self.codes, self.scales, self.bias = codes, scales, bias

    @staticmethod
    @abstractmethod
    def nearest_codes(numbers: torch.Tensor) -> torch.Tensor:
        """numbers: float32, of at most LARGEST; may be changed. What is copied into codes."""

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """Of a weight of floats, rounded to the nearest code."""
        where = weight.device
        codes = torch.empty(weight.shape, dtype=cls.DTYPE, device=where)
        scales = torch.empty(weight.shape[0], device=where)
        step = max(1, SLICE_NUMBERS // max(1, weight.shape[1]))
        for start in range(0, weight.shape[0], step):
            rows = weight[start : start + step].float()
            scale = (rows.abs().amax(1) / cls.LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
            codes[start : start + step] = cls.nearest_codes(rows / scale.unsqueeze(1))
            scales[start : start + step] = scale
        return cls(codes, scales, bias)

    @classmethod
    def head_of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """As any other layer."""
        return cls.of(weight, bias)

    @classmethod
    def sharded(cls, weights: Weights, part: LinearPart) -> Self:
        return cls.of(part.weight(weights), part.bias(weights))

    @classmethod
    def fused(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        biases = [part.bias for part in parts if part.bias is not None]
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(cls.DTYPE)  # not every type is joined
        return cls(codes, torch.cat([part.scales for part in parts]), torch.cat(biases) if biases else None)

    def reordered(self, outputs: torch.Tensor) -> Self:
        codes = self.codes.view(torch.uint8)[outputs].view(self.DTYPE)
        return type(self)(codes, self.scales[outputs], None if self.bias is None else self.bias[outputs])

    def dense(self) -> torch.Tensor:
        """The weight, float32 [out_features, in_features]."""
        return self.codes.float() * self.scales.unsqueeze(1)

    def without_bias(self) -> Self:
        return type(self)(self.codes, self.scales)
