"""The tensors of recurrent layers, by the names of their shape. Called by `tensors`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from actorllm.model.adapters import AdaptedLayer
from actorllm.model.families.recurrent_shapes import (
    GatedDeltaShape,
    Mamba2Shape,
    MambaShape,
    RecurrentShape,
    RgLruShape,
    ShortConvShape,
)
from actorllm.model.linear import Form, LinearPart, LinearWeight
from actorllm.model.weights import ALL, Weights

BETWEEN = ("x_proj", "dt_proj")
"""Products of Mamba between its first and its last one. No adapter adapts them."""


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


@dataclass(frozen=True, slots=True)
class MambaTensors:
    """Of one selective state-space layer. All but the products are float32."""

    first: LinearWeight
    """Its outputs: x, gate."""
    last: LinearWeight
    select: LinearWeight
    """Its outputs: numbers for step sizes, B, C."""
    steps: LinearWeight
    kernel: torch.Tensor  # [kernel_size, num_channels], the newest token last
    kernel_bias: torch.Tensor | None  # [num_channels]
    step_bias: torch.Tensor  # [num_channels]
    decay: torch.Tensor  # [num_channels, state_size], negative: a state is multiplied by exp(decay * step size)
    skip: torch.Tensor  # [num_channels]
    norms: tuple[torch.Tensor, ...] | None = None
    """[step_rank], [state_size], [state_size]: of the numbers for step sizes, of B, of C."""


@dataclass(frozen=True, slots=True)
class RgLruTensors:
    """Of one layer of real-gated linear recurrent units. All but the products are float32."""

    first: LinearWeight
    """Its outputs: gate, x."""
    last: LinearWeight
    kernel: torch.Tensor  # [kernel_size, num_channels], the newest token last
    kernel_bias: torch.Tensor  # [num_channels]
    gates: (
        torch.Tensor
    )  # [2, num_blocks, block_size, block_size]: of the input, of the recurrence; inputs before outputs
    gate_biases: torch.Tensor  # [2, num_blocks, 1, block_size]
    decay: torch.Tensor  # [num_channels], negative: a state is multiplied by exp(decay * gate)


@dataclass(frozen=True, slots=True)
class ShortConvTensors:
    """Of one layer of a short convolution. All but the products are float32."""

    first: LinearWeight
    """Its outputs: gate of the inputs, gate of what comes out, x."""
    last: LinearWeight
    kernel: torch.Tensor  # [kernel_size, num_channels], the newest token last
    kernel_bias: torch.Tensor | None  # [num_channels]


RecurrentTensors: TypeAlias = Mamba2Tensors | GatedDeltaTensors | MambaTensors | RgLruTensors | ShortConvTensors


def recurrent_tensors(
    prefix: str, shape: RecurrentShape, weights: Weights, form: Form, hidden_size: int
) -> RecurrentTensors:
    """prefix: of the layer."""
    prefix = f"{prefix}{shape.prefix}."
    if isinstance(shape, GatedDeltaShape):
        return gated_delta_tensors(prefix, shape, weights, form, hidden_size)
    if isinstance(shape, MambaShape):
        return mamba_tensors(prefix, shape, weights, form, hidden_size)
    if isinstance(shape, ShortConvShape):
        return short_conv_tensors(prefix, shape, weights, form, hidden_size)
    if isinstance(shape, RgLruShape):
        return rg_lru_tensors(prefix, shape, weights, form, hidden_size)
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
        first=form.sharded(
            weights, LinearPart(prefix + "in_proj", shape.made_size, hidden_size, has_bias=shape.has_bias)
        ),
        last=form.sharded(
            weights, LinearPart(prefix + "out_proj", hidden_size, shape.inner_size, has_bias=shape.has_bias)
        ),
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
    *firsts, _ = shape.products(hidden_size)
    start = len(shape.prefix) + 1
    parts = [form.sharded(weights, LinearPart(prefix + name[start:], size, hidden_size)) for name, size, _ in firsts]
    if not shape.is_split:
        orders = [order_by_part(shape, name[start:]) for name, *_ in firsts]
        parts = [part.reordered(order) for part, order in zip(parts, orders, strict=True)]
    return GatedDeltaTensors(
        first=form.fused(parts),
        last=form.sharded(weights, LinearPart(prefix + "out_proj", hidden_size, shape.inner_size)),
        kernel=kernel(prefix + "conv1d", shape.conv_size, shape.kernel_size, weights),
        step_bias=weights.take(prefix + "dt_bias", shape.num_value_heads, dtype=torch.float32).float(),
        decay=-weights.take(prefix + "A_log", shape.num_value_heads, dtype=torch.float32).float().exp(),
        norm=weights.take(prefix + "norm.weight", shape.value_dim, dtype=torch.float32).float(),
    )


def order_by_part(shape: GatedDeltaShape, name: str) -> torch.Tensor:
    """Outputs of a product that are grouped by key head: those of all heads for one part first. name: of the product."""
    repeats = shape.num_value_heads // shape.num_key_heads
    value_size = repeats * shape.value_dim
    both = {"in_proj_qkvz": [shape.key_dim, shape.key_dim, value_size, value_size], "in_proj_ba": [repeats, repeats]}
    sizes = both[name]
    outputs = torch.arange(shape.num_key_heads * sum(sizes)).view(shape.num_key_heads, -1)
    return torch.cat([part.reshape(-1) for part in outputs.split(sizes, 1)])  # type: ignore[no-untyped-call]


def mamba_tensors(prefix: str, shape: MambaShape, weights: Weights, form: Form, hidden_size: int) -> MambaTensors:
    """prefix: of the mixer."""
    size, has_bias = shape.num_channels, shape.has_bias

    def exact(name: str, *sizes: int) -> torch.Tensor:
        return weights.take(prefix + name, *sizes, dtype=torch.float32).float()

    norms = None
    if shape.norms is not None:
        sizes = (shape.step_rank, shape.state_size, shape.state_size)
        norms = tuple(exact(f"{name}.weight", one) for name, one in zip(shape.norms, sizes, strict=True))
    return MambaTensors(
        first=form.sharded(weights, LinearPart(prefix + "in_proj", 2 * size, hidden_size, has_bias=has_bias)),
        last=form.sharded(weights, LinearPart(prefix + "out_proj", hidden_size, size, has_bias=has_bias)),
        select=form.sharded(weights, LinearPart(prefix + "x_proj", shape.step_rank + 2 * shape.state_size, size)),
        steps=form.sharded(weights, LinearPart(prefix + "dt_proj", size, shape.step_rank)),
        kernel=kernel(prefix + "conv1d", size, shape.kernel_size, weights),
        kernel_bias=exact("conv1d.bias", size) if shape.has_conv_bias else None,
        step_bias=exact("dt_proj.bias", size),
        decay=-exact("A_log", size, shape.state_size).exp(),
        skip=exact("D", size),
        norms=norms,
    )


RG_LRU_DECAY = 8.0
"""How much faster a state decays than its parameter says, where the gate of the recurrence is open (the paper's c)."""


def rg_lru_tensors(prefix: str, shape: RgLruShape, weights: Weights, form: Form, hidden_size: int) -> RgLruTensors:
    """prefix: of the mixer."""
    size, blocks = shape.num_channels, (shape.num_blocks, shape.block_size)

    def exact(name: str, *sizes: int) -> torch.Tensor:
        return weights.take(prefix + name, *sizes, dtype=torch.float32).float()

    kinds = ("input", "recurrent")
    parts = [
        form.sharded(weights, LinearPart(prefix + name, size, hidden_size, has_bias=True))
        for name in ("linear_y", "linear_x")
    ]
    return RgLruTensors(
        first=form.fused(parts),
        last=form.sharded(weights, LinearPart(prefix + "linear_out", hidden_size, size, has_bias=True)),
        kernel=kernel(prefix + "conv_1d", size, shape.kernel_size, weights),
        kernel_bias=exact("conv_1d.bias", size),
        gates=torch.stack([exact(f"rg_lru.{kind}_gate_weight", *blocks, shape.block_size) for kind in kinds]),
        gate_biases=torch.stack([exact(f"rg_lru.{kind}_gate_bias", *blocks) for kind in kinds]).unsqueeze(2),
        decay=-RG_LRU_DECAY * torch.nn.functional.softplus(exact("rg_lru.recurrent_param", size)),
    )


def short_conv_tensors(
    prefix: str, shape: ShortConvShape, weights: Weights, form: Form, hidden_size: int
) -> ShortConvTensors:
    """prefix: of the mixer."""
    size, has_bias = shape.num_channels, shape.has_bias
    bias = weights.take(prefix + "conv.bias", size, dtype=torch.float32).float() if has_bias else None
    return ShortConvTensors(
        first=form.sharded(weights, LinearPart(prefix + "in_proj", 3 * size, hidden_size, has_bias=has_bias)),
        last=form.sharded(weights, LinearPart(prefix + "out_proj", hidden_size, size, has_bias=has_bias)),
        kernel=kernel(prefix + "conv", size, shape.kernel_size, weights),
        kernel_bias=bias,
    )


def recurrent_targets(
    prefix: str, shape: RecurrentShape, hidden_size: int
) -> tuple[list[AdaptedLayer], list[AdaptedLayer]]:
    """What adapters may adapt of a layer: of its first product, in the order of its outputs, and of its last one.

    prefix: of the layer.
    """
    products = shape.products(hidden_size)
    firsts: list[AdaptedLayer] = []
    end = 0
    for name, size, num_inputs in products[:-1]:
        if name.endswith(BETWEEN):
            continue
        start, end = end, end + size
        order = torch.arange(size)
        if isinstance(shape, GatedDeltaShape) and not shape.is_split:
            order = order_by_part(shape, name.rpartition(".")[2])
        firsts.append(AdaptedLayer(prefix + name, size, num_inputs, order, ALL, slice(start, end)))
    name, size, num_inputs = products[-1]
    last = AdaptedLayer(prefix + name, size, num_inputs, torch.arange(size), ALL, slice(0, size))
    return firsts, [last]
