"""Layers of GPTQ (Frantar et al., arXiv:2210.17323): codes along the inputs, zero points, and the group of each input.

Format: https://github.com/ModelCloud/GPTQModel. `qweight`: int32 [in_features * bits / 32, out_features]. `scales`:
[num_groups, out_features]. `qzeros`: int32 [num_groups, out_features * bits / 32]; in its first version they are one less than
the zero points. `g_idx`: int32 [in_features].
"""

from __future__ import annotations

import torch

from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.grouped import Grouped, checked_groups, checked_scales, unpacked
from actorllm.model.weights import Weights
from actorllm.types.quantization import QuantizedCheckpoint


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
    bits, num_groups = scheme.bits, 1 if scheme.group is None else in_features // scheme.group
    per_word = 32 // bits
    words = weights.take(f"{name}.qweight", -(-in_features // per_word), out_features, dtype=torch.int32)
    zeros = weights.take(f"{name}.qzeros", num_groups, -(-out_features // per_word), dtype=torch.int32)
    scales = weights.take(f"{name}.scales", num_groups, out_features, dtype=torch.float32)
    groups = None
    if scheme.has_order or weights.stored(f"{name}.g_idx") is not None:
        found = weights.take(f"{name}.g_idx", in_features, dtype=torch.int32)
        groups = checked_groups(f"{name}.g_idx", found, num_groups)
        if torch.equal(groups, torch.arange(in_features) // (in_features // num_groups)):
            groups = None
    return Grouped(
        unpacked(words.T, bits)[:, :in_features],
        checked_scales(f"{name}.scales", scales.T),
        unpacked(zeros, bits)[:, :out_features].T.float() + scheme.zero_offset,
        bits,
        groups,
    ).part(rows, columns, bias, weights.dtype)
