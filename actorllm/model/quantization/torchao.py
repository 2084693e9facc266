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
from actorllm.model.quantization.grouped import Grouped, checked_scales
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.stored_layer import StoredLayer

INTEGERS = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64}


def read(layer: StoredLayer) -> LinearWeight:
    """A layer. Raises CorruptModelError with the name of the tensor that is wrong."""
    num_outputs, num_inputs = layer.out_features, layer.in_features
    found, scale_name = layer.stored("._weight_qdata"), f"{layer.name}._weight_scale"
    if found is None:
        weight = layer.take(".weight", num_outputs, num_inputs, rows=layer.rows, columns=layer.columns)
        return Dense(weight.contiguous(), layer.bias)
    scales = checked_scales(scale_name, layer.take_whole("._weight_scale"))
    shape = tuple(scales.shape)
    if scales.numel() == 1:
        scales = scales.view(1, 1).expand(num_outputs, 1)
    if scales.dim() != 2 or len(scales) != num_outputs or not scales.shape[1] or num_inputs % scales.shape[1]:
        raise CorruptModelError(
            f"tensor {scale_name!r} has shape {shape}: [{num_outputs}, number of groups of {num_inputs} inputs] is needed"
        )
    if found.kind == "F8_E4M3":
        numbers = layer.take("._weight_qdata", num_outputs, num_inputs, dtype=torch.float32)
        return layer.rounded(numbers * scales.repeat_interleave(num_inputs // scales.shape[1], 1))
    codes = layer.take("._weight_qdata", num_outputs, num_inputs, dtype=torch.int8)
    zeros = torch.zeros_like(scales)
    kept, zero_name = layer.stored("._weight_zero_point"), f"{layer.name}._weight_zero_point"
    if kept is not None:
        zeros = layer.take_whole("._weight_zero_point", INTEGERS.get(kept.kind, torch.float32)).float()
        if zeros.shape != scales.shape:
            raise CorruptModelError(f"tensor {zero_name!r} has shape {kept.shape}, {tuple(scales.shape)} is needed")
        if not bool(zeros.isfinite().all()):
            raise CorruptModelError(f"tensor {zero_name!r} has zero points that are not finite")
    if scales.shape[1] == 1 and not bool(zeros.any()):
        return Int8(codes[layer.rows, layer.columns].contiguous(), scales[layer.rows, 0].contiguous(), layer.bias)
    bits = 4 if bool(((codes >= -8) & (codes < 8)).all()) else 8
    middle = 1 << (bits - 1)
    unsigned = (codes.short() + middle).to(torch.uint8)
    return layer.grouped(Grouped(unsigned, scales, zeros + middle, bits))
