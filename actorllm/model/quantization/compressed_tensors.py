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
from actorllm.model.quantization.stored_layer import StoredLayer


def read_int8(layer: StoredLayer) -> LinearWeight:
    """A layer with exactly the codes and scales of the files. Raises CorruptModelError."""
    codes = layer.take(
        ".weight", layer.out_features, layer.in_features, rows=layer.rows, columns=layer.columns, dtype=torch.int8
    )
    scales = layer.take(".weight_scale", layer.out_features, 1, rows=layer.rows, dtype=torch.float32).squeeze(1)
    if not bool(((scales >= 0) & scales.isfinite()).all()):
        raise CorruptModelError(f"tensor {layer.name + '.weight_scale'!r} has scales that are negative or not finite")
    return Int8(codes.contiguous(), scales.contiguous(), layer.bias)


def read_packed(layer: StoredLayer) -> LinearWeight:
    """A layer. Raises CorruptModelError with the name of the tensor that is wrong."""
    bits, num_groups = layer.scheme.bits, layer.num_groups
    per_word = 32 // bits
    words = layer.take(".weight_packed", layer.out_features, -(-layer.in_features // per_word), dtype=torch.int32)
    scales = layer.take(".weight_scale", layer.out_features, num_groups, dtype=torch.float32)
    shape = layer.take(".weight_shape", 2, dtype=torch.int64).tolist()
    if shape != [layer.out_features, layer.in_features]:
        raise CorruptModelError(
            f"tensor {layer.name + '.weight_shape'!r} says {shape}, config.json {[layer.out_features, layer.in_features]}"
        )
    if layer.scheme.is_symmetric:
        zeros = torch.full_like(scales, 1 << (bits - 1))
    else:
        found = layer.take(".weight_zero_point", -(-layer.out_features // per_word), num_groups, dtype=torch.int32)
        zeros = unpacked(found.T, bits)[:, : layer.out_features].T.float()
    groups = None
    if layer.scheme.has_order:
        order = layer.take(".weight_g_idx", layer.in_features, dtype=torch.int32)
        groups = checked_groups(f"{layer.name}.weight_g_idx", order, num_groups)
    return layer.grouped(
        Grouped(
            unpacked(words, bits)[:, : layer.in_features],
            checked_scales(f"{layer.name}.weight_scale", scales),
            zeros,
            bits,
            groups,
        )
    )
