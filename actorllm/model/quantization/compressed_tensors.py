"""Layers of compressed-tensors: integers of 8 bits ("int-quantized"), and of 4 or 8 packed into words ("pack-quantized").

Format: https://github.com/vllm-project/compressed-tensors. The first has `weight`, int8 [out_features, in_features], and
`weight_scale`, [out_features, 1]. The second has `weight_packed`, int32 [out_features, in_features * bits / 32],
`weight_scale`, [out_features, num_groups], `weight_shape`, perhaps `weight_zero_point`, int32 [out_features * bits / 32,
num_groups], and perhaps `weight_g_idx`, int32 [in_features].
"""

from __future__ import annotations

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.grouped import Grouped, checked_groups, checked_scales, unpacked
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import Weights
from actorllm.types.quantization import QuantizedCheckpoint


def read_int8(
    weights: Weights,
    scheme: QuantizedCheckpoint,
    name: str,
    out_features: int,
    in_features: int,
    rows: slice,
    columns: slice,
    bias: torch.Tensor | None,
) -> LinearWeight:
    """A layer with exactly the codes and scales of the files. Raises CorruptModelError."""
    codes = weights.take(f"{name}.weight", out_features, in_features, rows=rows, columns=columns, dtype=torch.int8)
    scales = weights.take(f"{name}.weight_scale", out_features, 1, rows=rows, dtype=torch.float32).squeeze(1)
    if not bool(((scales >= 0) & scales.isfinite()).all()):
        raise CorruptModelError(f"tensor {name + '.weight_scale'!r} has scales that are negative or not finite")
    return Int8(codes.contiguous(), scales.contiguous(), bias)


def read_packed(
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
    bits, num_groups = scheme.bits, 1 if scheme.group is None else in_features // scheme.group
    per_word = 32 // bits
    words = weights.take(f"{name}.weight_packed", out_features, -(-in_features // per_word), dtype=torch.int32)
    scales = weights.take(f"{name}.weight_scale", out_features, num_groups, dtype=torch.float32)
    shape = weights.take(f"{name}.weight_shape", 2, dtype=torch.int64).tolist()
    if shape != [out_features, in_features]:
        raise CorruptModelError(
            f"tensor {name + '.weight_shape'!r} says {shape}, config.json {[out_features, in_features]}"
        )
    if scheme.is_symmetric:
        zeros = torch.full_like(scales, 1 << (bits - 1))
    else:
        found = weights.take(f"{name}.weight_zero_point", -(-out_features // per_word), num_groups, dtype=torch.int32)
        zeros = unpacked(found.T, bits)[:, :out_features].T.float()
    groups = None
    if scheme.has_order:
        order = weights.take(f"{name}.weight_g_idx", in_features, dtype=torch.int32)
        groups = checked_groups(f"{name}.weight_g_idx", order, num_groups)
    return Grouped(
        unpacked(words, bits)[:, :in_features], checked_scales(f"{name}.weight_scale", scales), zeros, bits, groups
    ).part(rows, columns, bias, weights.dtype)
