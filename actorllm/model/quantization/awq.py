"""Layers of AWQ (Lin et al., arXiv:2306.00978) in the layout of its matrix products ("gemm"): codes along the outputs.

Format: https://github.com/casper-hansen/AutoAWQ. `qweight`: int32 [in_features, out_features / 8], in the order of `ORDER`.
`qzeros`: int32 [num_groups, out_features / 8], likewise. `scales`: [num_groups, out_features].
"""

from __future__ import annotations

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.grouped import Grouped, checked_scales, unpacked
from actorllm.model.weights import Weights
from actorllm.types.quantization import QuantizedCheckpoint

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which code of a word each of eight outputs is."""


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
    if out_features % 8:
        raise CorruptModelError(f"layer {name!r} has {out_features} outputs, AWQ has a multiple of 8")
    num_groups = 1 if scheme.group is None else in_features // scheme.group
    words = weights.take(f"{name}.qweight", in_features, out_features // 8, dtype=torch.int32)
    scales = weights.take(f"{name}.scales", num_groups, out_features, dtype=torch.float32)
    if scheme.is_symmetric:
        zeros = torch.full((out_features, num_groups), 8.0)
    else:
        found = weights.take(f"{name}.qzeros", num_groups, out_features // 8, dtype=torch.int32)
        zeros = unpacked(found, 4, ORDER).T.float()
    codes = unpacked(words, 4, ORDER).T
    return Grouped(codes, checked_scales(f"{name}.scales", scales.T), zeros, 4).part(rows, columns, bias, weights.dtype)
