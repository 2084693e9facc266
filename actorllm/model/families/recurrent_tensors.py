"""The tensors of recurrent layers, by the names of their shape. Called by `tensors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from actorllm.model.families.recurrent_shapes import GatedDeltaShape, Mamba2Shape, RecurrentShape
from actorllm.model.linear import Form, LinearWeight
from actorllm.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Mamba2Tensors:
    """Of one state-space layer. All but the products are float32."""

    first: LinearWeight
    """Its outputs: gate, x, B, C, step sizes."""
    last: LinearWeight
    kernel: torch.Tensor  # [kernel_size, conv_size], the newest token last
    kernel_bias: torch.Tensor | None  # [conv_size]
    step_bias: torch.Tensor  # [num_heads]
    decay: torch.Tensor  # [num_heads], negative: a state is multiplied by exp(decay * step size)
    skip: torch.Tensor  # [num_heads]
    norm: torch.Tensor | None  # [inner_size]


@dataclass(frozen=True, slots=True)
class GatedDeltaTensors:
    """Of one layer with linear attention. All but the products are float32."""

    first: LinearWeight
    """Its outputs: queries, keys, values, gates, betas, steps; each of all heads."""
    last: LinearWeight
    kernel: torch.Tensor  # [kernel_size, conv_size], the newest token last
    step_bias: torch.Tensor  # [num_value_heads]
    decay: torch.Tensor  # [num_value_heads], negative
    norm: torch.Tensor  # [value_dim]


RecurrentTensors: TypeAlias = Mamba2Tensors | GatedDeltaTensors


def recurrent_tensors(
    prefix: str, shape: RecurrentShape, weights: Weights, form: Form, hidden_size: int
) -> RecurrentTensors:
    """prefix: of the layer."""
    prefix = f"{prefix}{shape.prefix}."
    if isinstance(shape, GatedDeltaShape):
        return gated_delta_tensors(prefix, shape, weights, form, hidden_size)
    return mamba2_tensors(prefix, shape, weights, form, hidden_size)


def kernel(name: str, num_channels: int, size: int, weights: Weights) -> torch.Tensor:
    """Of a convolution over time, float32 [size, num_channels]."""
    taken = weights.take(f"{name}.weight", num_channels, 1, size, dtype=torch.float32)
    return taken.float()[:, 0].T.contiguous()


def mamba2_tensors(prefix: str, shape: Mamba2Shape, weights: Weights, form: Form, hidden_size: int) -> Mamba2Tensors:
    """prefix: of the mixer."""

    def exact(name: str, size: int) -> torch.Tensor:
        return weights.take(prefix + name, size, dtype=torch.float32).float()

    return Mamba2Tensors(
        first=form.sharded(weights, prefix + "in_proj", shape.made_size, hidden_size, has_bias=shape.has_bias),
        last=form.sharded(weights, prefix + "out_proj", hidden_size, shape.inner_size, has_bias=shape.has_bias),
        kernel=kernel(prefix + "conv1d", shape.conv_size, shape.kernel_size, weights),
        kernel_bias=exact("conv1d.bias", shape.conv_size) if shape.has_conv_bias else None,
        step_bias=exact("dt_bias", shape.num_heads),
        decay=-exact("A_log", shape.num_heads).exp(),
        skip=exact("D", shape.num_heads),
        norm=exact("norm.weight", shape.inner_size) if shape.has_norm else None,
    )


def gated_delta_tensors(
    prefix: str, shape: GatedDeltaShape, weights: Weights, form: Form, hidden_size: int
) -> GatedDeltaTensors:
    """prefix: of the mixer."""
    heads, repeats = shape.num_key_heads, shape.num_value_heads // shape.num_key_heads

    def by_part(name: str, sizes: Sequence[int]) -> LinearWeight:
        """A product whose outputs are grouped by key head: all heads of one part first. sizes: of a head's parts."""
        weight = form.sharded(weights, prefix + name, heads * sum(sizes), hidden_size)
        parts = torch.arange(weight.out_features).view(heads, -1).split(list(sizes), 1)  # type: ignore[no-untyped-call]
        return weight.reordered(torch.cat([part.reshape(-1) for part in parts]))

    value_size = repeats * shape.value_dim
    return GatedDeltaTensors(
        first=form.fused(
            [
                by_part("in_proj_qkvz", (shape.key_dim, shape.key_dim, value_size, value_size)),
                by_part("in_proj_ba", (repeats, repeats)),
            ]
        ),
        last=form.sharded(weights, prefix + "out_proj", hidden_size, shape.inner_size),
        kernel=kernel(prefix + "conv1d", shape.conv_size, shape.kernel_size, weights),
        step_bias=weights.take(prefix + "dt_bias", shape.num_value_heads, dtype=torch.float32).float(),
        decay=-weights.take(prefix + "A_log", shape.num_value_heads, dtype=torch.float32).float().exp(),
        norm=weights.take(prefix + "norm.weight", shape.value_dim, dtype=torch.float32).float(),
    )
