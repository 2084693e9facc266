"""Layers of torchao: integers of 8 or 4 bits, each in a byte of its own, and floats of 8 bits.

Format: https://github.com/pytorch/ao (`prototype/safetensors`), of its classes Int8Tensor, IntxUnpackedToInt8Tensor and
Float8Tensor. `_weight_qdata`: int8 or float8_e4m3fn [out_features, in_features]. `_weight_scale`: [out_features, num_groups], or
one number. `_weight_zero_point`: like the scales, where there is one. A weight is (code - zero) * scale. A layer without these
tensors is not quantized.
"""

from __future__ import annotations

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.grouped import Grouped, checked_scales, nearest
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import Weights
from actorllm.types.quantization import QuantizedCheckpoint

INTEGERS = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64}


def read(
    weights: Weights,
    scheme: QuantizedCheckpoint,
    name: str,
    out_features: int,
    in_features: int,
    rows: slice,
    columns: slice,
    bias: torch.Tensor | None,
) -> LinearWeight:
    """A layer. Raises CorruptModelError with the name of the tensor that is wrong."""
    code_name, scale_name, zero_name = (f"{name}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
    found = weights.stored(code_name)
    if found is None:
        weight = weights.take(f"{name}.weight", out_features, in_features, rows=rows, columns=columns)
        return Dense(weight.contiguous(), bias)
    stored = weights.stored(scale_name)
    shape = () if stored is None else stored.shape
    scales = checked_scales(scale_name, weights.take(scale_name, *shape, dtype=torch.float32))
    if scales.numel() == 1:
        scales = scales.view(1, 1).expand(out_features, 1)
    if scales.dim() != 2 or len(scales) != out_features or not scales.shape[1] or in_features % scales.shape[1]:
        raise CorruptModelError(
            f"tensor {scale_name!r} has shape {shape}: [{out_features}, number of groups of {in_features} inputs] is needed"
        )
    if found.kind == "F8_E4M3":
        numbers = weights.take(code_name, out_features, in_features, dtype=torch.float32)
        wide = numbers * scales.repeat_interleave(in_features // scales.shape[1], 1)
        return nearest(wide[rows, columns], bias, weights.dtype)
    codes = weights.take(code_name, out_features, in_features, dtype=torch.int8)
    zeros = torch.zeros_like(scales)
    kept = weights.stored(zero_name)
    if kept is not None:
        zeros = weights.take(zero_name, *kept.shape, dtype=INTEGERS.get(kept.kind, torch.float32)).float()
        if kept.shape != tuple(scales.shape):
            raise CorruptModelError(f"tensor {zero_name!r} has shape {kept.shape}, {tuple(scales.shape)} is needed")
        if not bool(zeros.isfinite().all()):
            raise CorruptModelError(f"tensor {zero_name!r} has zero points that are not finite")
    if scales.shape[1] == 1 and not bool(zeros.any()):
        return Int8(codes[rows, columns].contiguous(), scales[rows, 0].contiguous(), bias)
    bits = 4 if bool(((codes >= -8) & (codes < 8)).all()) else 8
    middle = 1 << (bits - 1)
    unsigned = (codes.short() + middle).to(torch.uint8)
    return Grouped(unsigned, scales, zeros + middle, bits).part(rows, columns, bias, weights.dtype)
