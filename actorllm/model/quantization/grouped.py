"""Weights whose inputs share scales in groups, as checkpoints have them, and what they become here.

Where groups are of 32 inputs or a multiple, 4 bits stay 4 bits: the same codes, with scales and zeros in bfloat16. All else is
rounded to 8 bits, one scale for each output, or stays as floats where that would change it too much (`nearest`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.int4 import MIDDLE, Int4, fitting
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import is_exact

MAX_ERROR = 0.025
"""By how much rounding to 8 bits may change a weight: the root mean square of the difference, in mean magnitudes of the weight.
Normally distributed weights change by 0.011. Outliers, which set the scales, raise it; a mean square of the weight would hide
that, because they raise it as well."""


@dataclass(frozen=True)
class Grouped:
    """A weight is (code - zero) * scale."""

    codes: torch.Tensor
    """uint8 [out_features, in_features]."""
    scales: torch.Tensor
    """float32 [out_features, num_groups]."""
    zeros: torch.Tensor
    """float32 [out_features, num_groups]: the code that is 0."""
    bits: int
    groups: torch.Tensor | None = None
    """int64 [in_features]: the group of each input; None: neighbours share one."""

    def dense(self) -> torch.Tensor:
        """float32 [out_features, in_features]."""
        groups = self._groups()
        return (self.codes.float() - self.zeros[:, groups]).mul_(self.scales[:, groups])

    def _groups(self) -> torch.Tensor:
        if self.groups is not None:
            return self.groups
        return torch.arange(self.codes.shape[1]) // (self.codes.shape[1] // self.scales.shape[1])

    def part(self, rows: slice, columns: slice, bias: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
        """These outputs (rows) and inputs (columns) as a layer. bias: of these outputs. dtype: of the model."""
        outputs = replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=self.zeros[rows])
        made = outputs._int4(columns, bias) if self.bits == 4 else None
        return made or nearest(outputs.dense()[:, columns], bias, dtype)

    def _int4(self, columns: slice, bias: torch.Tensor | None) -> Int4 | None:
        """None: groups of these inputs have other sizes than products can be computed with."""
        num_inputs = self.codes.shape[1]
        start, stop, _ = columns.indices(num_inputs)
        size = num_inputs // self.scales.shape[1]
        order = None
        if self.groups is not None:
            counts = torch.bincount(self.groups, minlength=self.scales.shape[1])
            if stop - start != num_inputs or not bool((counts == size).all()):
                return None
            order = self.groups.argsort(stable=True)
        group = fitting(size, start, stop)
        if group is None:
            return None
        codes = (self.codes if order is None else self.codes[:, order])[:, start:stop].contiguous()
        wanted = torch.arange(start, stop, group) // size  # the group of the files that each group here is of
        scales = self.scales[:, wanted].bfloat16().float()
        return Int4(codes, scales, (MIDDLE - self.zeros[:, wanted]) * scales, bias, order)


def nearest(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> LinearWeight:
    """Of a weight in float32: 8 bits where they are near enough, and where their products are exact; else the model's type."""
    rounded = Int8.of(weight, bias)
    error = rounded.codes.float().mul_(rounded.scales.unsqueeze(1)).sub_(weight).square_().mean().sqrt()
    if bool(error <= MAX_ERROR * weight.abs().mean()) and is_exact():
        rounded.change = float(error / weight.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny))
        return rounded
    return Dense(weight.to(dtype), bias)


def unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [rows, columns] as the codes in it, uint8 [rows, columns * 32 / bits]: the lowest bits first.

    order: which code of a word each one is; None: they are in order.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if order is not None:
        shifts = shifts[list(order)]
    return ((words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def checked_scales(name: str, scales: torch.Tensor) -> torch.Tensor:
    """Raises CorruptModelError for scales that are not finite."""
    if not bool(scales.isfinite().all()):
        raise CorruptModelError(f"tensor {name!r} has scales that are not finite")
    return scales


def checked_groups(name: str, groups: torch.Tensor, num_groups: int) -> torch.Tensor:
    """int64. Raises CorruptModelError for a group that does not exist."""
    if not bool(((groups >= 0) & (groups < num_groups)).all()):
        raise CorruptModelError(
            f"tensor {name!r} has groups from {int(groups.min())} to {int(groups.max())}, and there are {num_groups}"
        )
    return groups.long()
