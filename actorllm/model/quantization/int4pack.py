"""Products of weights of 4 bits on the CPU, by an operation of torch. Made by `model.cpu.layers.linear`.

Only its form for bfloat16 is vectorised; those for float32 and float16 are some 30 times slower. So activations are rounded to
bfloat16 in models of every type. It adds in float32 in an order that does not depend on the number of rows.
"""

from __future__ import annotations

import torch

from actorllm.model.linear import Linear
from actorllm.model.quantization.int4 import Int4

_product = torch.ops.aten._weight_int4pack_mm_for_cpu
_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu

MULTIPLE = 16
"""Outputs come in as many; what is missing is filled up with zeros."""

SLICE_OUTPUTS = 1024
"""Outputs that are packed at a time: their codes take 4 bytes each meanwhile. A multiple of the blocks of the layout."""


class Int4Linear(Linear):
    """`Int4`, packed once: the only copy that is kept."""

    __slots__ = ("_group", "_scales", "bias", "order", "packed")

    def __init__(self, weight: Int4) -> None:
        super().__init__(weight.out_features, weight.in_features, weight.num_bytes)
        num_missing = -weight.out_features % MULTIPLE
        slices = []
        for start in range(0, weight.out_features, SLICE_OUTPUTS):
            codes = weight.codes[start : start + SLICE_OUTPUTS].to(torch.int32)
            is_last = start + SLICE_OUTPUTS >= weight.out_features
            slices.append(_pack(_filled(codes, num_missing) if is_last else codes, 1))
        self.packed: torch.Tensor = torch.cat(slices) if len(slices) > 1 else slices[0]
        both = _filled(torch.stack((weight.scales, weight.zeros), 2), num_missing)
        self._scales = both.transpose(0, 1).contiguous()  # bfloat16 [num_groups, out_features, 2]
        self._group, self.order, self.bias = weight.group, weight.order, weight.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.bfloat16() if self.order is None else x.bfloat16().index_select(1, self.order)
        made: torch.Tensor = _product(seen.contiguous(), self.packed, self._group, self._scales)
        if made.shape[1] != self.out_features:
            made = made[:, : self.out_features].contiguous()
        made = made.to(x.dtype)
        return made if self.bias is None else made.add_(self.bias)


def _filled(rows: torch.Tensor, num_missing: int) -> torch.Tensor:
    """With so many rows of zeros below."""
    return torch.cat((rows, rows.new_zeros(num_missing, *rows.shape[1:]))) if num_missing else rows
