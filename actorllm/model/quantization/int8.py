"""Weights of 8 bits with one scale for each output, and activations of 8 bits with one scale for each token (W8A8).

A product is a sum of integers, which is exact, times both scales. So a row depends on nothing but itself: its bits are the same
in every batch. `Int8.__call__` states the arithmetic; `onednn.Int8Linear` is the same, fast.
"""

from __future__ import annotations

import torch

from actorllm.model.quantization.per_output import PerOutput

LIMIT = 127
"""Codes are at least -LIMIT and at most LIMIT."""

OFFSET = 128
"""Added to the codes of activations: products of unsigned by signed numbers are the ones that processors are fast at."""

_LARGEST = torch.tensor(float(LIMIT), dtype=torch.float32, device="cpu")
_ROUNDING = torch.tensor(OFFSET + 0.5, dtype=torch.float32, device="cpu")
"""Numbers of Python would be made tensors in every product, which takes longer than dividing some rows by them."""


class Int8(PerOutput):
    """See the module docstring."""

    __slots__ = ("change",)

    DTYPE = torch.int8
    LARGEST = LIMIT

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(codes, scales, bias)
        self.change: float | None = None
        """The root mean square of what rounding has changed, in that of the weight; None: not known, or nothing."""

    @staticmethod
    def nearest_codes(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round_()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantized(x)
        sums = (codes.double() - OFFSET) @ self.codes.double().T  # integers below 2^53: exact
        return rescaled(sums.float() * self.scales, scales, self.bias, x.dtype)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token of [num_tokens, in_features] as codes plus OFFSET, uint8, and its scale, float32 [num_tokens, 1].

    A token that is not finite has a scale that is not, either, so that its products are not finite.
    """
    exact = x.float()
    scales = exact.abs().amax(1, keepdim=True).div_(_LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    # Conversion cuts off what is behind the point: with the half this rounds to the nearest.
    return exact.mul(scales.reciprocal()).add_(_ROUNDING).to(torch.uint8), scales


def rescaled(
    products: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """products: float32 [num_tokens, out_features], without the scales of the tokens; changed in place."""
    products.mul_(scales)
    if bias is not None:
        products.add_(bias)
    return products.to(dtype)
