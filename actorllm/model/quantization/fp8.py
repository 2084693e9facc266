"""Layers of floats of 8 bits (float8_e4m3fn), with one scale for the tensor, for each output, or for each block.

Two writers: "fp8" of config.json has `weight_scale_inv` (blocks) or `weight_scale`, compressed-tensors' "float-quantized" has
`weight_scale`. A processor computes no products of them, so they are rounded to integers of 8 bits where that is near enough
(`read`). A device computes them (`read_exactly`).
"""

from __future__ import annotations

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.quantization.float8 import Fp8
from actorllm.model.quantization.grouped import checked_scales
from actorllm.model.quantization.stored_layer import StoredLayer

BLOCK = 128


def read(layer: StoredLayer) -> LinearWeight:
    """A layer, rounded. Raises CorruptModelError with the name of the tensor that is wrong."""
    weight, scales = _read(layer)
    return layer.rounded(weight.mul_(scales))


def read_exactly(layer: StoredLayer) -> LinearWeight:
    """A layer with the codes and scales of the files; with scales by blocks, as `read` has it. Raises CorruptModelError."""
    weight, scales = _read(layer)
    if scales.shape[1] > 1 or not bool(weight.isfinite().all()):
        return layer.rounded(weight.mul_(scales))
    codes = weight[layer.rows, layer.columns].to(torch.float8_e4m3fn)
    return Fp8(codes, scales.expand(layer.out_features, 1)[layer.rows, 0].contiguous(), layer.bias)


def _read(layer: StoredLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the codes, float32 [out_features, in_features], and scales that they are to be multiplied by."""
    found, num_outputs = layer.stored(".weight"), layer.out_features
    if found is not None and found.kind != "F8_E4M3":
        raise CorruptModelError(
            f"tensor {layer.name + '.weight'!r} is {found.kind}, F8_E4M3 is needed "
            f"(quantization_config: {layer.scheme.method})"
        )
    weight = layer.take(".weight", num_outputs, layer.in_features, dtype=torch.float32)
    for part in (".input_scale", ".activation_scale"):  # of activations, which stay as they are here
        if layer.stored(part) is not None:
            layer.take_whole(part)
    part = ".weight_scale" if layer.stored(".weight_scale_inv") is None else ".weight_scale_inv"
    scales = checked_scales(layer.name + part, layer.take_whole(part))
    block_rows, block_columns = layer.scheme.block or (BLOCK, BLOCK)
    shape, blocks = tuple(scales.shape), (-(-num_outputs // block_rows), -(-layer.in_features // block_columns))
    if scales.numel() == 1:
        scales = scales.reshape(1, 1)
    elif shape == blocks:  # which may be as many as there are outputs
        by_row = scales.repeat_interleave(block_rows, 0)[:num_outputs]
        scales = by_row.repeat_interleave(block_columns, 1)[:, : layer.in_features]
    elif shape in ((num_outputs,), (num_outputs, 1)):
        scales = scales.reshape(-1, 1)
    else:
        raise CorruptModelError(
            f"tensor {layer.name + part!r} has shape {shape}: one scale, {num_outputs} or {blocks} are needed"
        )
    return weight, scales
