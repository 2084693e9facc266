"""x @ weight.T for few rows, with what comes before and after it in the same launch (reference: `reference.fused_linear`).

For a handful of rows a product costs the reading of its weight and a launch. So the norm in front of it, and the bias, gated
activation or residual behind it, are done here. The weight's rows are the long side of the tile: a tile of the result is
[BLOCK_N, BLOCK_M], transposed when it is stored. The matrix units for large tiles want at least 64 there, which wide products
have. Narrow ones are cut into more and smaller tiles, so that there are programs enough. Padding a few rows of x to 16 on the
short side costs nothing. The norm needs no pass of its own: the sum of squares is gathered in the loop, and
scales the result.

As a dependent launch, a program asks for its weights before it waits for the kernel in front of it. They are constant, and
the memory would be idle otherwise.

`is_skinny` says for which shapes this is to be used; others go to cuBLAS (`torch.nn.functional.linear`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import Config, dependent, lookup
from actorllm_kernels.silu_mul import ACTIVATIONS, activate


@triton.jit
def prefetch_rows(weight_ptr, row, is_row, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Asks for these rows of a 16-bit weight [.., K] in the second-level cache, a line of 128 bytes at a time."""
    LINES: tl.constexpr = 16
    line = tl.arange(0, LINES) * 64
    for start in range(0, K, LINES * 64):
        column = tl.minimum(start + line, K - 1)
        at = weight_ptr + tl.where(is_row, row, 0).to(tl.int64)[:, None] * K + column[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\nmov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["num_rows"])
def skinny_gemm_kernel(
    x_ptr,
    weight_ptr,
    weight_norm_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    IS_GATED: tl.constexpr = ACTIVATION != ""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    is_n = n < N
    is_m = m < num_rows
    if PREFETCH:
        prefetch_rows(weight_ptr, n, is_n, K, BLOCK_N)
        if IS_GATED:
            prefetch_rows(weight_ptr, n + N, is_n, K, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    # Rows outside of the weight read row 0, and are not stored: a load without a mask is the faster one.
    row = tl.where(is_n, n, 0).to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + k
        x_mask = is_m[None, :] if EVEN_K else is_m[None, :] & (column < K)[:, None]
        x = tl.load(x_ptr + m[None, :] * K + column[:, None], mask=x_mask, other=0.0)  # [BLOCK_K, BLOCK_M]
        if EVEN_K:
            w = tl.load(weight_ptr + row + column[None, :])  # [BLOCK_N, BLOCK_K]
        else:
            w = tl.load(weight_ptr + row + column[None, :], mask=(column < K)[None, :], other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            if EVEN_K:
                norm = tl.load(weight_norm_ptr + column).to(tl.float32)
            else:
                norm = tl.load(weight_norm_ptr + column, mask=column < K, other=0.0).to(tl.float32)
            x = (wide * norm[:, None]).to(x.dtype)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if IS_GATED:
            if EVEN_K:
                w = tl.load(weight_ptr + N * K + row + column[None, :])
            else:
                w = tl.load(weight_ptr + N * K + row + column[None, :], mask=(column < K)[None, :], other=0.0)
            if UPCAST:
                w = w.to(tl.float32)
            acc_up = tl.dot(w, x, acc_up, input_precision="ieee")

    if HAS_NORM:
        scale = 1.0 / tl.sqrt(squares / K + eps)
        acc *= scale[None, :]
        acc_up *= scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            acc_up += tl.load(bias_ptr + N + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        acc = activate(acc, ACTIVATION) * acc_up
    y = tl.trans(acc)  # [BLOCK_M, BLOCK_N]
    at = m[:, None] * N + n[None, :]
    mask = is_m[:, None] & is_n[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


def shape_class(num_outputs: int, is_gated: bool) -> str:
    """Of the configuration table. num_outputs: columns of y."""
    width = "narrow" if num_outputs < 2048 else "medium" if num_outputs < 8192 else "wide"
    return f"{width}-gated" if is_gated else width


def _config(num_outputs: int, is_gated: bool, device: torch.device) -> Config:
    return dict(lookup("skinny_gemm", shape_class(num_outputs, is_gated), device))


def is_skinny(num_rows: int, num_outputs: int, is_gated: bool, device: torch.device) -> bool:
    """Whether the table wants this kernel for the shape; num_outputs: columns of y."""
    return num_rows <= _config(num_outputs, is_gated, device)["MAX_ROWS"]


def skinny_gemm(
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
    """y = rmsnorm(x) @ weight.T + bias + residual, each part of it optional.

    x: [num_rows, in_features], at most 64 rows; weight: [out_features, in_features]; y, residual: [num_rows, out_features],
    y may be the residual. norm: weight of the norm [in_features]. activation: one of `silu_mul.ACTIVATIONS`; then weight and
    bias have the gate's out_features first, those of the other factor behind them, and y is their gated product.
    """
    num_rows, in_features = x.shape
    out_features = y.shape[1]
    if num_rows > 64:
        raise ValueError(f"{num_rows} rows are too many for skinny_gemm, which takes 64")
    if activation and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    config = _config(out_features, bool(activation), x.device)
    del config["MAX_ROWS"]
    launch = dependent(pdl, x.device)
    prefetches = bool(config.pop("PREFETCH", 1)) and launch["PDL"] and x.element_size() == 2
    skinny_gemm_kernel[(triton.cdiv(out_features, config["BLOCK_N"]),)](
        x,
        weight,
        x if norm is None else norm,
        x if bias is None else bias,
        x if residual is None else residual,
        y,
        num_rows,
        eps,
        N=out_features,
        K=in_features,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        UPCAST=x.device.type == "cpu",
        PREFETCH=prefetches,
        **launch,
        **config,
    )
