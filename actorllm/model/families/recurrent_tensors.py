"""The tensors of recurrent layers, by the names of their shape. Called by `tensors`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actorllm.model.families.recurrent_shapes import Mamba2Shape, RecurrentShape
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


RecurrentTensors = Mamba2Tensors


def recurrent_tensors(
    prefix: str, shape: RecurrentShape, weights: Weights, form: Form, hidden_size: int
) -> RecurrentTensors:
    """prefix: of the layer."""
    return mamba2_tensors(f"{prefix}{shape.prefix}.", shape, weights, form, hidden_size)


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
