"""Products of 8 bits on the CPU, by oneDNN. Made by `model.cpu.layers.linear`.

The codes of activations are unsigned: with signed ones oneDNN takes a loop that is hundreds of times slower. The dynamic
products of torch (`quantized::linear_dynamic`) have one scale for the whole batch, so that a row would depend on its neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.linear import Linear
from actorllm.model.quantization.int8 import LIMIT, OFFSET, Int8, quantized, rescaled

_product = torch.ops.onednn.qlinear_pointwise.default
_pack = torch.ops.onednn.qlinear_prepack

PACKED_FOR = 16
"""Rows for which the layout of a weight is chosen. It serves any number."""

_NO_SCALARS: list[Any] = []


class Int8Linear(Linear):
    """`Int8`, packed once into oneDNN's own layout: the only copy that is kept."""

    __slots__ = ("_zeros", "bias", "packed", "scales")

    def __init__(self, weight: Int8) -> None:
        """Raises UnsupportedModelError where the sums of this processor are not exact."""
        super().__init__(weight.out_features, weight.in_features, weight.num_bytes)
        if not is_exact():
            raise UnsupportedModelError(
                "weights of 8 bits: the products of this processor are not exact (it has no VNNI); leave quantization at None"
            )
        self.packed: torch.Tensor = packed(weight.codes)
        self.scales, self._zeros = weight.scales, torch.zeros(weight.out_features, dtype=torch.int32)
        self.bias = None if weight.bias is None else weight.bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantized(x)
        return rescaled(self.of_codes(codes), scales, self.bias, x.dtype)

    def of_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """The products of quantized tokens, float32, before their scales and the bias are applied (`rescaled`)."""
        return product(codes, self.packed, self.scales, self._zeros)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Weights, int8 [out_features, in_features], in the layout for `product`; opaque."""
    made: torch.Tensor = _pack(codes, [PACKED_FOR, codes.shape[1]])
    return made


def product(codes: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """float32 [num_tokens, out_features] of uint8 [num_tokens, in_features], times the scales of the outputs."""
    made: torch.Tensor = _product(
        codes, 1.0, OFFSET, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", _NO_SCALARS, ""
    )
    return made


@cache
def is_exact() -> bool:
    """Whether sums of the largest numbers are right: without VNNI, pairs are added in 16 bits and cut off."""
    size, num_outputs = 512, 32
    codes = torch.full((PACKED_FOR, size), OFFSET + LIMIT, dtype=torch.uint8)
    weights = torch.full((num_outputs, size), LIMIT, dtype=torch.int8)
    scales, zeros = torch.ones(num_outputs), torch.zeros(num_outputs, dtype=torch.int32)
    expected = torch.full((PACKED_FOR, num_outputs), float(size * LIMIT * LIMIT))
    weight = packed(weights)
    return torch.equal(product(codes, weight, scales, zeros), expected) and torch.equal(
        product(codes[:1], weight, scales, zeros), expected[:1]
    )
