"""The product of one row, with what `skinny_gemm` fuses (reference: `reference.fused_linear`).

The time is that of reading the weight once. Every program has a few outputs. It reads their rows of the weight straight into
registers, in pieces of 16 bytes a thread. There is no shared memory in the loop and nothing is waited for in it. So many programs
fit on a multiprocessor, and keep the memory busy together. On an H200 that reads at up to 0.93 of its bandwidth. Tiles for the
matrix units with copies that are waited for reach half of it: one row leaves nothing for those units to do.

Where all programs are there at once, each loads its first piece before it waits for the kernel in front. That is safe, since no
kernel of a step writes a weight. With more programs than that, it has cost up to a fifth. Called by `skinny_gemm`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup, num_multiprocessors
from actorllm_kernels.launcher import launch
from actorllm_kernels.silu_mul import activate

AT_ONCE = 8
"""Programs that a multiprocessor has room for, roughly."""
LONG = 2048
"""Inputs from which a row can be read in the longer pieces of many outputs."""
UNROLLED = tl.constexpr(8)
"""Pieces of a row whose loads the compiler may mix; more would be too much code."""


@triton.jit
def pieces(weight_ptr, row, column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of some rows of the weight, [BLOCK_N, BLOCK_K]. row: the first number of each row."""
    if K % BLOCK_K == 0:
        return tl.load(weight_ptr + row[:, None] + column[None, :])
    return tl.load(weight_ptr + row[:, None] + column[None, :], mask=(column < K)[None, :], other=0.0)


@triton.jit
def add_piece(
    acc,
    squares,
    w,
    x_ptr,
    weight_norm_ptr,
    column,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The products with one piece of x, by column: nothing is summed between threads before the end."""
    is_there = column < K
    x = tl.load(x_ptr + column, mask=is_there, other=0.0)
    wide = x.to(tl.float32)
    if HAS_NORM:
        squares += wide * wide
        norm = tl.load(weight_norm_ptr + column, mask=is_there, other=0.0).to(tl.float32)
        wide = (wide * norm).to(x.dtype).to(tl.float32)
    return acc + w.to(tl.float32) * wide[None, :], squares


@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    weight_norm_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    IS_GATED: tl.constexpr = ACTIVATION != ""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_n = n < N
    row = tl.where(is_n, n, 0).to(tl.int64) * K  # outputs behind the last read row 0, and are not stored
    up = row + N * K
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    nothing = tl.zeros([BLOCK_K], tl.float32)

    if IS_EARLY:
        first = pieces(weight_ptr, row, k, K, BLOCK_K)
        if IS_GATED:
            first_up = pieces(weight_ptr, up, k, K, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if not IS_EARLY:
        first = pieces(weight_ptr, row, k, K, BLOCK_K)
        if IS_GATED:
            first_up = pieces(weight_ptr, up, k, K, BLOCK_K)
    acc, squares = add_piece(acc, squares, first, x_ptr, weight_norm_ptr, k, K, HAS_NORM)
    if IS_GATED:
        acc_up, nothing = add_piece(acc_up, nothing, first_up, x_ptr, weight_norm_ptr, k, K, HAS_NORM)
    if K <= UNROLLED * BLOCK_K:
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):
            w = pieces(weight_ptr, row, start + k, K, BLOCK_K)
            acc, squares = add_piece(acc, squares, w, x_ptr, weight_norm_ptr, start + k, K, HAS_NORM)
            if IS_GATED:
                w = pieces(weight_ptr, up, start + k, K, BLOCK_K)
                acc_up, nothing = add_piece(acc_up, nothing, w, x_ptr, weight_norm_ptr, start + k, K, HAS_NORM)
    else:
        for start in tl.range(BLOCK_K, K, BLOCK_K, loop_unroll_factor=4):
            w = pieces(weight_ptr, row, start + k, K, BLOCK_K)
            acc, squares = add_piece(acc, squares, w, x_ptr, weight_norm_ptr, start + k, K, HAS_NORM)
            if IS_GATED:
                w = pieces(weight_ptr, up, start + k, K, BLOCK_K)
                acc_up, nothing = add_piece(acc_up, nothing, w, x_ptr, weight_norm_ptr, start + k, K, HAS_NORM)

    y = tl.sum(acc, 1)
    gated = tl.sum(acc_up, 1)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
        gated *= scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)
        if IS_GATED:
            gated += tl.load(bias_ptr + N + n, mask=is_n, other=0.0).to(tl.float32)
    if IS_GATED:
        y = activate(y, ACTIVATION) * gated
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + n, mask=is_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=is_n)


def shape_class(num_outputs: int, num_inputs: int, device: torch.device) -> str:
    """Of the configuration table: "few" outputs, or "many"."""
    return "many" if num_outputs > 4 * AT_ONCE * num_multiprocessors(device) and num_inputs >= LONG else "few"


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    pdl: bool = False,
) -> None:
    """Arguments as of `skinny_gemm`; x, y, residual: [1, ..]."""
    in_features, out_features = x.shape[1], y.shape[1]
    config: dict[str, Any] = dict(lookup("gemv", shape_class(out_features, in_features, x.device), x.device))
    num_programs = triton.cdiv(out_features, config["BLOCK_N"])
    launch(
        gemv_kernel,
        (num_programs,),
        (
            x,
            weight,
            x if norm is None else norm,
            x if bias is None else bias,
            x if residual is None else residual,
            y,
            eps,
        ),
        N=out_features,
        K=in_features,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        IS_EARLY=num_programs <= AT_ONCE * num_multiprocessors(x.device),
        **dependent(pdl, x.device),
        **config,
    )
