"""Weights in floats of 4 bits (E2M1 of the OCP Microscaling Formats), two in a byte, the lower half first.

In mxfp4, 32 inputs share a scale of 8 bits, which is a power of two. In nvfp4, 16 share a scale in float8_e4m3fn, and all of a
layer share one in float32 that they are divided by. compressed-tensors stores layers as `weight_packed`, uint8 [out_features,
in_features / 2], `weight_scale`, [out_features, num_groups], and for nvfp4 `weight_global_scale`. A processor computes no products
of them, so they are rounded to integers of 8 bits where that is near enough.

ModelOpt stores nvfp4 as `weight`, uint8, `weight_scale`, and `weight_scale_2`, which the scales are multiplied by.
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
    packed = layer.take(".weight_packed", layer.out_features, layer.in_features // 2, dtype=torch.uint8)
    groups = numbers(packed).view(layer.out_features, layer.num_groups, layer.scheme.group)
    if layer.scheme.layout == NVFP4_PACKED:
        weight = groups.mul_((_scales(layer) / _whole_scale(layer, ".weight_global_scale")).unsqueeze(2))
        if layer.stored(".input_global_scale") is not None:  # of activations, which stay as they are here
            layer.take(".input_global_scale", 1, dtype=torch.float32)
    else:
        exponents = layer.take(".weight_scale", layer.out_features, layer.num_groups, dtype=torch.uint8)
        if bool((exponents == NO_SCALE).any()):
            raise CorruptModelError(f"tensor {layer.name + '.weight_scale'!r} has scales that are not finite")
        weight = scaled(groups, exponents)
    return layer.rounded(weight.view(layer.out_features, layer.in_features))


def read_modelopt(layer: StoredLayer) -> LinearWeight:
    """A layer of ModelOpt. Raises CorruptModelError with the name of the tensor that is wrong."""
    assert layer.scheme.group is not None
    packed = layer.take(".weight", layer.out_features, layer.in_features // 2, dtype=torch.uint8)
    groups = numbers(packed).view(layer.out_features, layer.num_groups, layer.scheme.group)
    if layer.stored(".input_scale") is not None:  # of activations, which stay as they are here
        layer.take_whole(".input_scale")
    weight = groups.mul_((_scales(layer) * _whole_scale(layer, ".weight_scale_2")).unsqueeze(2))
    return layer.rounded(weight.view(layer.out_features, layer.in_features))


def _scales(layer: StoredLayer) -> torch.Tensor:
    """Of nvfp4: float32 [out_features, num_groups]."""
    found = layer.take(".weight_scale", layer.out_features, layer.num_groups, dtype=torch.float32)
    return checked_scales(f"{layer.name}.weight_scale", found)


def _whole_scale(layer: StoredLayer, part: str) -> torch.Tensor:
    """The scale that all of a layer share: one number, which writers store in several shapes."""
    found = layer.take_whole(part)
    if found.numel() != 1 or not bool((found > 0) & found.isfinite()):
        told = found.item() if found.numel() == 1 else f"of shape {tuple(found.shape)}"
        raise CorruptModelError(f"tensor {layer.name + part!r} is {told}, which is no scale")
    return found.reshape(1)
