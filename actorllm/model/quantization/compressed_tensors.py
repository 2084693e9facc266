"""Checkpoints of compressed-tensors with int8 weights: codes and scales exactly as they are in the files.

A quantized layer has `weight`, int8 [out_features, in_features], and `weight_scale`, [out_features, 1]. Layers that the
checkpoint ignores are plain. Format: https://github.com/vllm-project/compressed-tensors ("int-quantized").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.linear import LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import ALL, Weights
from actorllm.types.quantization import QuantizedCheckpoint


class CompressedTensors:
    """The form (`model.linear.Form`) of each layer of such a checkpoint."""

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def quantizes(self, name: str) -> bool:
        """Whether the layer of this name is quantized."""
        return self._checkpoint.quantizes(name)

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """A head that is the embedding stays as it is: the checkpoint has no scales for it."""
        return Dense.of(weight, bias)

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return self.of(weight, bias)

    def sharded(
        self,
        weights: Weights,
        name: str,
        out_features: int,
        in_features: int,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
        has_bias: bool = False,
    ) -> LinearWeight:
        if not self.quantizes(name):
            return Dense.sharded(
                weights, name, out_features, in_features, rows=rows, columns=columns, has_bias=has_bias
            )
        codes = weights.take(f"{name}.weight", out_features, in_features, rows=rows, columns=columns, dtype=torch.int8)
        scales = weights.take(f"{name}.weight_scale", out_features, 1, rows=rows, dtype=torch.float32).squeeze(1)
        if not bool(((scales >= 0) & scales.isfinite()).all()):
            raise CorruptModelError(f"tensor {name + '.weight_scale'!r} has scales that are negative or not finite")
        bias = weights.take(f"{name}.bias", out_features, rows=rows) if has_bias else None
        return Int8(codes.contiguous(), scales.contiguous(), bias)

    def fused(self, parts: Sequence[Any]) -> LinearWeight:
        forms = {type(part) for part in parts}
        if len(forms) > 1:
            raise UnsupportedModelError(
                "quantized weights (compressed-tensors) are not supported: quantization_config.ignore has some of the layers "
                "that are computed as one (query, key and value; gate and up), and not the others"
            )
        made: LinearWeight = forms.pop().fused(parts)
        return made
