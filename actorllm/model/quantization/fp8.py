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
from actorllm.model.quantization.grouped import checked_scales, nearest
from actorllm.model.weights import Weights
from actorllm.types.quantization import QuantizedCheckpoint

BLOCK = 128


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
    """A layer, rounded. Raises CorruptModelError with the name of the tensor that is wrong."""
    weight, scales = _read(weights, scheme, name, out_features, in_features)
    return nearest((weight.mul_(scales))[rows, columns], bias, weights.dtype)


def read_exactly(
    weights: Weights,
    scheme: QuantizedCheckpoint,
    name: str,
    out_features: int,
    in_features: int,
    rows: slice,
    columns: slice,
    bias: torch.Tensor | None,
) -> LinearWeight:
    """A layer with the codes and scales of the files; with scales by blocks, as `read` has it. Raises CorruptModelError."""
    weight, scales = _read(weights, scheme, name, out_features, in_features)
    if scales.shape[1] > 1 or not bool(weight.isfinite().all()):
        return nearest(weight.mul_(scales)[rows, columns], bias, weights.dtype)
    codes = weight[rows, columns].to(torch.float8_e4m3fn)
    return Fp8(codes, scales.expand(out_features, 1)[rows, 0].contiguous(), bias)


def _read(
    weights: Weights, scheme: QuantizedCheckpoint, name: str, out_features: int, in_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the codes, float32 [out_features, in_features], and scales that they are to be multiplied by."""
    found = weights.stored(f"{name}.weight")
    if found is not None and found.kind != "F8_E4M3":
        raise CorruptModelError(
            f"tensor {name + '.weight'!r} is {found.kind}, F8_E4M3 is needed (quantization_config: {scheme.method})"
        )
    weight = weights.take(f"{name}.weight", out_features, in_features, dtype=torch.float32)
    if weights.stored(f"{name}.input_scale") is not None:  # of activations, which stay as they are here
        weights.take(f"{name}.input_scale", *_shape(weights, f"{name}.input_scale"), dtype=torch.float32)
    scale_name = f"{name}.weight_scale"
    if weights.stored(f"{scale_name}_inv") is not None:
        scale_name = f"{scale_name}_inv"
    shape = _shape(weights, scale_name)
    scales = checked_scales(scale_name, weights.take(scale_name, *shape, dtype=torch.float32))
    block_rows, block_columns = scheme.block or (BLOCK, BLOCK)
    blocks = (-(-out_features // block_rows), -(-in_features // block_columns))
    if scales.numel() == 1:
        scales = scales.reshape(1, 1)
    elif shape == blocks:  # which may be as many as there are outputs
        by_row = scales.repeat_interleave(block_rows, 0)[:out_features]
        scales = by_row.repeat_interleave(block_columns, 1)[:, :in_features]
    elif shape in ((out_features,), (out_features, 1)):
        scales = scales.reshape(-1, 1)
    else:
        raise CorruptModelError(
            f"tensor {scale_name!r} has shape {shape}: one scale, {out_features} or {blocks} are needed"
        )
    return weight, scales


def _shape(weights: Weights, name: str) -> tuple[int, ...]:
    found = weights.stored(name)
    return () if found is None else found.shape
