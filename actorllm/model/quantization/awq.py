"""Layers of AWQ (Lin et al., arXiv:2306.00978) in the layout of its matrix products ("gemm"): codes along the outputs.

Format: https://github.com/casper-hansen/AutoAWQ. `qweight`: int32 [in_features, out_features / 8], in the order of `ORDER`.
`qzeros`: int32 [num_groups, out_features / 8], likewise. `scales`: [num_groups, out_features].
"""

from __future__ import annotations

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.grouped import Grouped, checked_scales, unpacked
from actorllm.model.quantization.stored_layer import StoredLayer

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which code of a word each of eight outputs is."""


def read(layer: StoredLayer) -> LinearWeight:
    """A layer. Raises CorruptModelError with the name of the tensor that is wrong."""
    if layer.out_features % 8:
        raise CorruptModelError(f"layer {layer.name!r} has {layer.out_features} outputs, AWQ has a multiple of 8")
    num_groups = layer.num_groups
    words = layer.take(".qweight", layer.in_features, layer.out_features // 8, dtype=torch.int32)
    scales = layer.take(".scales", num_groups, layer.out_features, dtype=torch.float32)
    if layer.scheme.is_symmetric and layer.stored(".qzeros") is None:
        zeros = torch.full((layer.out_features, num_groups), 8.0)
    else:
        found = layer.take(".qzeros", num_groups, layer.out_features // 8, dtype=torch.int32)
        zeros = unpacked(found, 4, ORDER).T.float()
    codes = unpacked(words, 4, ORDER).T
    return layer.grouped(Grouped(codes, checked_scales(f"{layer.name}.scales", scales.T), zeros, 4))
