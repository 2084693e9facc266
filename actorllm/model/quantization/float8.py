"""Weights of floats of 8 bits (float8_e4m3fn) with one scale for each output. Activations stay as they are (W8A16).

Only devices that multiply them have this form (`model.cuda`). `Fp8.__call__` states the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.int8 import SLICE_NUMBERS
from actorllm.model.weights import ALL, Weights

LARGEST = 448.0
"""Of the numbers of this type."""


class Fp8(LinearWeight):
    """See the module docstring."""

    __slots__ = ("bias", "codes", "scales")

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """codes: float8_e4m3fn [out_features, in_features]. scales: float32 [out_features]. bias: [out_features]."""
        super().__init__(codes.shape[0], codes.shape[1], codes.numel() + 4 * scales.numel())
        self.codes, self.scales, self.bias = codes, scales, bias

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Self:
        """Of a weight of floats, rounded to the nearest code."""
        where = weight.device if weight.is_meta else None
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=where)
        scales = torch.empty(weight.shape[0], device=where)
        step = max(1, SLICE_NUMBERS // max(1, weight.shape[1]))
        for start in range(0, weight.shape[0], step):
            rows = weight[start : start + step].float()
            scale = (rows.abs().amax(1) / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
            codes[start : start + step] = (rows / scale.unsqueeze(1)).clamp_(-LARGEST, LARGEST).to(codes.dtype)
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
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        return cls(codes, torch.cat([part.scales for part in parts]), torch.cat(biases) if biases else None)

    def reordered(self, outputs: torch.Tensor) -> Self:
        codes = self.codes.view(torch.uint8)[outputs].view(torch.float8_e4m3fn)
        return type(self)(codes, self.scales[outputs], None if self.bias is None else self.bias[outputs])

    def without_bias(self) -> Self:
        return type(self)(self.codes, self.scales)

    def dense(self) -> torch.Tensor:
        """The weight, float32 [out_features, in_features]."""
        return self.codes.float() * self.scales.unsqueeze(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = (x.double() @ self.dense().double().T).to(x.dtype)
        return made if self.bias is None else made + self.bias.to(x.dtype)
