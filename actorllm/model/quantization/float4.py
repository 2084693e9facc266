"""Weights in floats of 4 bits (E2M1 of the OCP Microscaling Formats), two in a byte, the lower half first.

In mxfp4, 32 inputs share a scale of 8 bits, which is a power of two. In nvfp4, 16 share a scale in float8_e4m3fn, and all of a
layer share one in float32 that they are divided by. compressed-tensors stores layers as `weight_packed`, uint8 [out_features,
in_features / 2], `weight_scale`, [out_features, num_groups], and for nvfp4 `weight_global_scale`. A processor computes no products
of them, so they are rounded to integers of 8 bits where that is near enough.
"""

from __future__ import annotations

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.grouped import checked_scales
from actorllm.model.quantization.stored_layer import StoredLayer
from actorllm.types.quantization import NVFP4_PACKED

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_BLOCK = 32
"""Weights of mxfp4 that share a scale."""
SCALE_BIAS = 127
"""Of the exponents that are scales of mxfp4."""
NO_SCALE = 255
"""An exponent that stands for no number."""


def numbers(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] as float32 [..., 2 * n]."""
    values = torch.tensor(E2M1)
    return torch.stack((values[(packed & 15).int()], values[(packed >> 4).int()]), -1).flatten(-2)


def scaled(groups: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float32 [..., num_groups, MX_BLOCK] times the scales of mxfp4, uint8 [..., num_groups]: exact."""
    return torch.ldexp(groups, (exponents.int() - SCALE_BIAS).unsqueeze(-1))


def read(layer: StoredLayer) -> LinearWeight:
    """A layer of compressed-tensors. Raises CorruptModelError with the name of the tensor that is wrong."""
    assert layer.scheme.group is not None
    num_groups = layer.num_groups
    packed = layer.take(".weight_packed", layer.out_features, layer.in_features // 2, dtype=torch.uint8)
    groups = numbers(packed).view(layer.out_features, num_groups, layer.scheme.group)
    scale_name = f"{layer.name}.weight_scale"
    if layer.scheme.layout == NVFP4_PACKED:
        scales = checked_scales(
            scale_name, layer.take(".weight_scale", layer.out_features, num_groups, dtype=torch.float32)
        )
        whole = layer.take(".weight_global_scale", 1, dtype=torch.float32)
        if not bool((whole > 0) & whole.isfinite()):
            raise CorruptModelError(
                f"tensor {layer.name + '.weight_global_scale'!r} is {whole.item()}, which is no scale"
            )
        if layer.stored(".input_global_scale") is not None:  # of activations, which stay as they are here
            layer.take(".input_global_scale", 1, dtype=torch.float32)
        weight = groups.mul_((scales / whole).unsqueeze(2))
    else:
        exponents = layer.take(".weight_scale", layer.out_features, num_groups, dtype=torch.uint8)
        if bool((exponents == NO_SCALE).any()):
            raise CorruptModelError(f"tensor {scale_name!r} has scales that are not finite")
        weight = scaled(groups, exponents)
    return layer.rounded(weight.view(layer.out_features, layer.in_features))
