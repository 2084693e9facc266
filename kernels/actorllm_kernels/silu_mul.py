"""The gated activation between the two matrix products of an MLP (reference: `reference.activation_mul`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """One of ACTIVATIONS, in float32."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # 0.5 * x * (1 + tanh(z)) is x * sigmoid(2 * z)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def activation_mul_kernel(
    x_ptr,
    y_ptr,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(x_ptr + row * (2 * SIZE) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * SIZE) + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * SIZE + columns, (activate(gate, ACTIVATION) * up).to(y_ptr.dtype.element_ty), mask=mask)


def activation_mul(x: torch.Tensor, y: torch.Tensor, activation: str = "silu", *, pdl: bool = False) -> None:
    """y = activation(gate) * up. x: [num_tokens, 2 * size], the gate in the first half; y: [num_tokens, size]; contiguous.

    activation: one of ACTIVATIONS ("gelu" is the exact one).
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    num_tokens, size = y.shape
    config = {**lookup("activation_mul", "*", x.device), **dependent(pdl, x.device)}
    launch(
        activation_mul_kernel,
        (num_tokens, triton.cdiv(size, config["BLOCK"])),
        (x, y),
        SIZE=size,
        ACTIVATION=activation,
        **config,
    )
