"""Experts whose weights are one tensor for all of a layer, as gpt-oss, Granite and Llama 4 have them: in floats or in mxfp4.

Weights in mxfp4 (`model.quantization.float4`) are read to floats, exactly. Called by `tensors`.
"""

from __future__ import annotations

import torch

from actorllm.errors import CorruptModelError
from actorllm.model.families.decoder_config import ExpertShape
from actorllm.model.linear import Form, LinearWeight
from actorllm.model.quantization.float4 import MX_BLOCK, numbers, scaled
from actorllm.model.weights import ALL, Weights


class StackedExperts:
    """Of one layer."""

    def __init__(self, weights: Weights, prefix: str, shape: ExpertShape, hidden_size: int) -> None:
        """prefix: of the names of the tensors."""
        self._weights, self._prefix, self._shape, self._hidden_size = weights, prefix, shape, hidden_size

    def read(self, number: int, part: slice, form: Form, adds_bias: bool) -> tuple[LinearWeight, LinearWeight]:
        """Gate and up side by side, and down.

        Arguments:
            number: of the expert.
            part: of its intermediate size, that is this rank's.
            form: of the weights.
            adds_bias: of down; of several ranks one does.
        """
        shape, size = self._shape, self._shape.intermediate_size
        (pairs,) = shape.gate_up
        if shape.has_halves:
            both = self._whole(pairs, number, 2 * size, self._hidden_size)
            weight = self._whole(shape.down, number, self._hidden_size, size)
            gate_up = form.of(torch.cat([half[part] for half in (both[:size], both[size:])]))
            return gate_up, form.of(weight[:, part].contiguous())
        both, bias = self._layer(pairs, number, 2 * size, self._hidden_size)
        halves = [slice(start, None, 2) for start in (0, 1)]  # gate and up take turns
        gate_up = form.of(
            torch.cat([both[half][part] for half in halves]), torch.cat([bias[half][part] for half in halves])
        )
        weight, bias = self._layer(shape.down, number, self._hidden_size, size)
        return gate_up, form.of(weight[:, part].contiguous(), bias if adds_bias else None)

    def _whole(self, name: str, number: int, out_features: int, in_features: int) -> torch.Tensor:
        """[out_features, in_features] of one expert."""
        shape, one = self._shape, slice(number, number + 1)
        full = f"{self._prefix}{name}{shape.suffix}"
        if shape.has_inputs_first:
            return self._weights.take(full, shape.num_experts, in_features, out_features, rows=one)[0].T
        return self._weights.take(full, shape.num_experts, out_features, in_features, rows=one)[0]

    def _layer(self, name: str, number: int, out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[out_features, in_features] and [out_features] of one expert."""
        name, count, one = self._prefix + name, self._shape.num_experts, slice(number, number + 1)
        if self._weights.stored(f"{name}_blocks") is not None:
            weight = self._mxfp4(name, one, out_features, in_features)
        else:
            weight = self._weights.take(name, count, in_features, out_features, rows=one)[0].T
        return weight, self._weights.take(f"{name}_bias", count, out_features, rows=one)[0]

    def _mxfp4(self, name: str, one: slice, out_features: int, in_features: int) -> torch.Tensor:
        count, num_blocks = self._shape.num_experts, in_features // MX_BLOCK
        if in_features % MX_BLOCK:
            raise CorruptModelError(f"{name!r} has {in_features} inputs, and mxfp4 has groups of {MX_BLOCK}")
        blocks = self._weights.take(
            f"{name}_blocks", count, out_features, num_blocks, MX_BLOCK // 2, rows=one, columns=ALL, dtype=torch.uint8
        )[0]
        scales = self._weights.take(f"{name}_scales", count, out_features, num_blocks, rows=one, dtype=torch.uint8)[0]
        exact = scaled(numbers(blocks), scales)  # [out_features, num_blocks, MX_BLOCK]
        return exact.view(out_features, in_features).to(self._weights.dtype)
