"""Rows of activations as codes of 8 bits with one scale each, and sums of products of integers as numbers.

For products of 8 bits by 8 bits (reference: `quantized_rows`, `scaled_sums`). A row is read twice, the second time from a cache.
A row that is not finite gets a scale that is not, so that its products are not finite either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.float8 import narrowed
from actorllm_kernels.launcher import launch

LARGEST = {torch.uint8: 448.0, torch.int8: 127.0}
"""The code of the largest number of a row, by the type of the codes; uint8: the bits of a float8_e4m3fn."""
LEAST = tl.constexpr(1e-30)
"""Rows of no larger numbers have codes of 0: their scale has no inverse."""


@triton.jit
def nearest_integer(x):
    """float32 as int8, to the nearest and of two to the even one; of at most 127."""
    # 1.5 * 2**23 rounds to whole numbers, and leaves them in the lowest bits.
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    rounded_ptr,
    factors_ptr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    MOST: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    highest = tl.zeros([BLOCK], tl.float32)
    zeros = tl.zeros([BLOCK], tl.float32)  # NaN where a number is not finite
    for start in range(0, SIZE, BLOCK):
        at = start + column
        x = tl.load(x_ptr + row * STRIDE + at, mask=at < SIZE, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.abs(x))
        zeros += x * 0.0
    largest = tl.max(highest, 0)
    tl.store(factors_ptr + row, largest / MOST + tl.sum(zeros, 0))
    inverse = tl.where(largest > LEAST, MOST / tl.maximum(largest, LEAST), 0.0)
    for start in range(0, SIZE, BLOCK):
        at = start + column
        x = tl.load(x_ptr + row * STRIDE + at, mask=at < SIZE, other=0.0).to(tl.float32) * inverse
        if IS_FLOAT:
            codes = narrowed(x)
        else:
            codes = nearest_integer(tl.minimum(tl.maximum(x, -MOST), MOST))
        tl.store(rounded_ptr + row * SIZE + at, codes, mask=at < SIZE)


@triton.jit
def scale_sums_kernel(
    sums_ptr,
    factors_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.load(sums_ptr + row * N + n, mask=n < N, other=0).to(tl.float32)
    y = sums * tl.load(factors_ptr + row) * tl.load(scales_ptr + n, mask=n < N, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def quantize_rows(x: torch.Tensor, rounded: torch.Tensor, factors: torch.Tensor, *, pdl: bool = False) -> None:
    """x = rounded * factors, up to rounding.

    x: [num_rows, size], or columns of wider rows. rounded: [num_rows or more, size], int8, or uint8 for the bits of
    float8_e4m3fn. factors: float32 [num_rows, 1].
    """
    num_rows, size = x.shape
    launch(
        quantize_rows_kernel,
        (num_rows,),
        (x, rounded, factors),
        SIZE=size,
        STRIDE=x.stride(0),
        MOST=LARGEST[rounded.dtype],
        IS_FLOAT=rounded.dtype == torch.uint8,
        **dependent(pdl, x.device),
        **lookup("quantize_rows", "*", x.device),
    )


def scale_sums(
    sums: torch.Tensor,
    factors: torch.Tensor,
    scales: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """y = sums * factors * scales + bias.

    sums: int32 [num_rows or more, N]. factors: float32 [num_rows, 1]. scales: float32 [N]. y: [num_rows, N]. bias: [N].
    """
    num_rows, num_outputs = y.shape
    config = lookup("scale_sums", "*", y.device)
    launch(
        scale_sums_kernel,
        (num_rows, triton.cdiv(num_outputs, config["BLOCK"])),
        (sums, factors, scales, factors if bias is None else bias, y),
        N=num_outputs,
        HAS_BIAS=bias is not None,
        **dependent(pdl, y.device),
        **config,
    )
