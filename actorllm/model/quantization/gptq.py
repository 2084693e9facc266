"""Layers of GPTQ (Frantar et al., arXiv:2210.17323): codes along the inputs, zero points, and the group of each input.

Format: https://github.com/ModelCloud/GPTQModel. `qweight`: int32 [in_features * bits / 32, out_features]. `scales`:
[num_groups, out_features]. `qzeros`: int32 [num_groups, out_features * bits / 32]; in its first version they are one less than
the zero points. `g_idx`: int32 [in_features].
"""

from __future__ import annotations

import torch

from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.grouped import Grouped, checked_groups, checked_scales, unpacked
from actorllm.model.quantization.stored_layer import StoredLayer


def read(layer: StoredLayer) -> LinearWeight:
    """A layer. Raises CorruptModelError with the name of the tensor that is wrong."""
    bits, num_groups = layer.scheme.bits, layer.num_groups
    per_word = 32 // bits
    words = layer.take(".qweight", -(-layer.in_features // per_word), layer.out_features, dtype=torch.int32)
    zeros = layer.take(".qzeros", num_groups, -(-layer.out_features // per_word), dtype=torch.int32)
    scales = layer.take(".scales", num_groups, layer.out_features, dtype=torch.float32)
    groups = None
    if layer.scheme.has_order or layer.stored(".g_idx") is not None:
        found = layer.take(".g_idx", layer.in_features, dtype=torch.int32)
        groups = checked_groups(f"{layer.name}.g_idx", found, num_groups)
        if torch.equal(groups, torch.arange(layer.in_features) // (layer.in_features // num_groups)):
            groups = None
    return layer.grouped(
        Grouped(
            unpacked(words.T, bits)[:, : layer.in_features],
            checked_scales(f"{layer.name}.scales", scales.T),
            unpacked(zeros, bits)[:, : layer.out_features].T.float() + layer.scheme.zero_offset,
            bits,
            groups,
        )
    )
