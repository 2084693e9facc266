"""Checkpoints whose linear layers are quantized: each layer is read in the layout of its files, by its method.

Layers that the checkpoint leaves out are plain. What is not of the shape that config.json asks for is refused by the name of
its tensor (`weights.take`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.linear import LinearPart, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import side_by_side
from actorllm.model.quantization import awq, bitsandbytes, compressed_tensors, float4, fp8, gptq, torchao
from actorllm.model.quantization.stored_layer import StoredLayer
from actorllm.model.weights import Weights
from actorllm.types.quantization import (
    BITSANDBYTES,
    GPTQ,
    MODELOPT_FP8,
    MODELOPT_NVFP4,
    MXFP4_PACKED,
    NVFP4_PACKED,
    TORCHAO,
    QuantizedCheckpoint,
)

READERS: dict[str, Callable[[StoredLayer], LinearWeight]] = {
    "int-quantized": compressed_tensors.read_int8,
    "pack-quantized": compressed_tensors.read_packed,
    "float-quantized": fp8.read,
    NVFP4_PACKED: float4.read,
    MXFP4_PACKED: float4.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "fp8": fp8.read,
    TORCHAO: torchao.read,
    MODELOPT_FP8: fp8.read,
    MODELOPT_NVFP4: float4.read_modelopt,
    BITSANDBYTES: bitsandbytes.read,
}
"""By layout (`QuantizedCheckpoint`)."""


class CheckpointForm:
    """The form (`model.linear.Form`) of each layer of such a checkpoint."""

    def __init__(self, scheme: QuantizedCheckpoint, *, keeps_floats: bool = False) -> None:
        """keeps_floats: layers of floats of 8 bits stay as they are where each output has one scale."""
        self.scheme, self._keeps_floats = scheme, keeps_floats

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """What is in memory has no scales, and stays as it is."""
        return Dense.of(weight, bias)

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return Dense.of(weight, bias)

    def sharded(self, weights: Weights, part: LinearPart) -> LinearWeight:
        if not self.scheme.quantizes(part.name):
            return Dense.sharded(weights, part)
        group = self.scheme.group
        if group is not None and part.in_features % group:
            raise CorruptModelError(
                f"layer {part.name!r} has {part.in_features} inputs, which quantization_config says are in groups of {group}"
            )
        # Some writers give every quantized layer a bias, of zeros where the model has none.
        if self.scheme.layout == GPTQ and weights.stored(f"{part.name}.bias") is not None:
            part = part._replace(has_bias=True)
        read = READERS[self.scheme.layout]
        if read is fp8.read and self._keeps_floats:
            read = fp8.read_exactly
        return read(
            StoredLayer(
                weights,
                self.scheme,
                part.name,
                part.out_features,
                part.in_features,
                part.rows,
                part.columns,
                part.bias(weights),
            )
        )

    def fused(self, parts: Sequence[Any]) -> LinearWeight:
        return side_by_side(parts)
