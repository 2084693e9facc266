"""Shapes of recurrent layers: what they keep of a sequence, whatever its length, and what their tensors are called."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from actorllm.errors import CorruptModelError


class StateSpec(NamedTuple):
    """One array that a layer keeps of a sequence."""

    shape: tuple[int, ...]
    is_exact: bool
    """float32, whatever the type of the model."""

    def num_bytes(self, itemsize: int) -> int:
        """itemsize: of the type of the model."""
        return math.prod(self.shape) * (4 if self.is_exact else itemsize)


def convolution_state(kernel_size: int, num_channels: int) -> StateSpec:
    """The last inputs of a causal convolution. Raises CorruptModelError: it sees one token, and would keep none."""
    if kernel_size < 2:
        raise CorruptModelError(
            f"config.json: convolutions of recurrent layers have a kernel of {kernel_size}; 2 or more are needed"
        )
    return StateSpec((kernel_size - 1, num_channels), is_exact=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """A state-space layer whose decay is one number a head (Mamba 2, arXiv:2405.21060).

    Its first product makes gate, x, B, C and a step size for each head. A causal convolution goes over x, B and C.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    """Of heads that share B and C, and over which the norm before the last product goes."""
    state_size: int
    kernel_size: int
    """Tokens that the convolution sees, the newest included."""
    has_conv_bias: bool
    has_bias: bool
    """Of the first and the last product."""
    eps: float
    limits: tuple[float, float] = (0.0, math.inf)
    """Of step sizes."""
    has_norm: bool = True
    """Before the last product."""
    gates_first: bool = True
    """The gate is multiplied before that norm; else behind it."""
    scales: tuple[float, float, float, float, float] = (1.0,) * 5
    """Of gate, x, B, C and step sizes, as the first product makes them."""
    output_scale: float = 1.0
    """Of the last product."""
    prefix: str = "mixer"
    """Of the names of its tensors, within the layer."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise CorruptModelError(
                f"config.json: {self.num_heads} heads of state-space layers are no multiple of {self.num_groups} groups"
            )

    @property
    def inner_size(self) -> int:
        """What the last product reads."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def made_size(self) -> int:
        """Outputs of the first product."""
        return self.inner_size + self.conv_size + self.num_heads

    def products(self, hidden_size: int) -> list[tuple[str, int, int]]:
        """Names, outputs and inputs of the linear layers."""
        return [
            (f"{self.prefix}.in_proj", self.made_size, hidden_size),
            (f"{self.prefix}.out_proj", hidden_size, self.inner_size),
        ]

    @property
    def states(self) -> Mapping[str, StateSpec]:
        """By name: the inputs of the convolution that come before the next token, and the state of every head."""
        return {
            "conv": convolution_state(self.kernel_size, self.conv_size),
            "heads": StateSpec((self.num_heads, self.head_dim, self.state_size), is_exact=True),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaShape:
    """Linear attention with a gated delta rule (arXiv:2412.06464).

    Its first product makes queries, keys, values, a gate, and two numbers a head. A causal convolution goes over the first three.
    """

    num_key_heads: int
    num_value_heads: int
    """Neighbours among them share a query and a key."""
    key_dim: int
    value_dim: int
    kernel_size: int
    """Tokens that the convolution sees, the newest included."""
    eps: float
    is_split: bool = False
    """Its first product is four tensors, each of all heads; else two, whose outputs are grouped by key head."""
    output_scale: float = 1.0
    """Of the last product."""
    prefix: str = "linear_attn"
    """Of the names of its tensors, within the layer."""

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise CorruptModelError(
                f"config.json: {self.num_value_heads} value heads of linear attention are no multiple of {self.num_key_heads} "
                f"key heads"
            )

    @property
    def inner_size(self) -> int:
        """What the last product reads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.inner_size

    def products(self, hidden_size: int) -> list[tuple[str, int, int]]:
        """Names, outputs and inputs of the linear layers."""
        last = (f"{self.prefix}.out_proj", hidden_size, self.inner_size)
        if self.is_split:
            sizes = {"qkv": self.conv_size, "z": self.inner_size, "b": self.num_value_heads, "a": self.num_value_heads}
            return [*((f"{self.prefix}.in_proj_{name}", size, hidden_size) for name, size in sizes.items()), last]
        return [
            (f"{self.prefix}.in_proj_qkvz", self.conv_size + self.inner_size, hidden_size),
            (f"{self.prefix}.in_proj_ba", 2 * self.num_value_heads, hidden_size),
            last,
        ]

    @property
    def states(self) -> Mapping[str, StateSpec]:
        """By name: the inputs of the convolution that come before the next token, and the state of every head."""
        return {
            "conv": convolution_state(self.kernel_size, self.conv_size),
            "heads": StateSpec((self.num_value_heads, self.key_dim, self.value_dim), is_exact=True),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape:
    """A selective state-space layer whose decay is one number for each channel and entry of its state (Mamba, arXiv:2312.00752).

    Its first product makes x and a gate. A causal convolution goes over x. Of that, another product makes a few numbers for the
    step sizes, then B and C. One more makes a step size for each channel of those numbers.
    """

    num_channels: int
    state_size: int
    """Of each channel."""
    step_rank: int
    """Numbers that the step sizes of all channels are made of."""
    kernel_size: int
    """Tokens that the convolution sees, the newest included."""
    has_conv_bias: bool
    has_bias: bool
    """Of the first and the last product."""
    norm_eps: float | None = None
    """Of norms without weights, of B, of C, and of the numbers for step sizes (Falcon Mamba); None: there are none."""
    norms: tuple[str, str, str] | None = None
    """Tensors of weights of these norms: of the numbers for step sizes, of B, of C (Jamba)."""
    output_scale: float = 1.0
    """Of the last product."""
    prefix: str = "mixer"
    """Of the names of its tensors, within the layer."""

    def products(self, hidden_size: int) -> list[tuple[str, int, int]]:
        """Names, outputs and inputs of the linear layers."""
        return [
            (f"{self.prefix}.in_proj", 2 * self.num_channels, hidden_size),
            (f"{self.prefix}.x_proj", self.step_rank + 2 * self.state_size, self.num_channels),
            (f"{self.prefix}.dt_proj", self.num_channels, self.step_rank),
            (f"{self.prefix}.out_proj", hidden_size, self.num_channels),
        ]

    @property
    def states(self) -> Mapping[str, StateSpec]:
        """By name: the inputs of the convolution that come before the next token, and the state of every channel."""
        return {
            "conv": convolution_state(self.kernel_size, self.num_channels),
            "channels": StateSpec((self.num_channels, self.state_size), is_exact=True),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruShape:
    """A real-gated linear recurrent unit (RG-LRU of Griffin, arXiv:2402.19427): the state of a channel is one number.

    Its first product makes a gate and x. A causal convolution goes over x. Of that, two products by blocks of channels make gates
    of the input and of the recurrence.
    """

    num_channels: int
    num_blocks: int
    """Of neighbouring channels, each with products of its own."""
    kernel_size: int
    """Tokens that the convolution sees, the newest included."""
    output_scale: float = 1.0
    """Of the last product."""
    prefix: str = "temporal_block"
    """Of the names of its tensors, within the layer."""

    def __post_init__(self) -> None:
        if self.num_channels % self.num_blocks:
            raise CorruptModelError(
                f"config.json: {self.num_channels} channels of recurrent layers are no multiple of {self.num_blocks} blocks"
            )

    @property
    def block_size(self) -> int:
        return self.num_channels // self.num_blocks

    def products(self, hidden_size: int) -> list[tuple[str, int, int]]:
        """Names, outputs and inputs of the linear layers."""
        return [
            (f"{self.prefix}.linear_y", self.num_channels, hidden_size),
            (f"{self.prefix}.linear_x", self.num_channels, hidden_size),
            (f"{self.prefix}.linear_out", hidden_size, self.num_channels),
        ]

    @property
    def states(self) -> Mapping[str, StateSpec]:
        """By name: the inputs of the convolution that come before the next token, and the state of every channel."""
        return {
            "conv": convolution_state(self.kernel_size, self.num_channels),
            "channels": StateSpec((self.num_channels,), is_exact=True),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvShape:
    """A convolution over a few tokens between two gates (LFM2): its state is the last inputs alone.

    Its first product makes a gate of the inputs, a gate of what comes out, and x.
    """

    num_channels: int
    kernel_size: int
    """Tokens that the convolution sees, the newest included."""
    has_bias: bool
    """Of both products and of the convolution."""
    output_scale: float = 1.0
    """Of the last product."""
    prefix: str = "conv"
    """Of the names of its tensors, within the layer."""

    def products(self, hidden_size: int) -> list[tuple[str, int, int]]:
        """Names, outputs and inputs of the linear layers."""
        return [
            (f"{self.prefix}.in_proj", 3 * self.num_channels, hidden_size),
            (f"{self.prefix}.out_proj", hidden_size, self.num_channels),
        ]

    @property
    def states(self) -> Mapping[str, StateSpec]:
        """By name: the inputs of the convolution that come before the next token."""
        return {"conv": convolution_state(self.kernel_size, self.num_channels)}


def state_bytes(shape: RecurrentShape, num_layers: int, itemsize: int) -> int:
    """Memory for the states of one sequence. itemsize: of the type of the model."""
    return num_layers * sum(spec.num_bytes(itemsize) for spec in shape.states.values())


RecurrentShape: TypeAlias = Mamba2Shape | GatedDeltaShape | MambaShape | RgLruShape | ShortConvShape
