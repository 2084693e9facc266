"""Products with quantized weights, for few rows, and weights in the type of the model, for many (reference: `dequantized`).

As `skinny_gemm`, but for what is read of the weight: a byte for each number, or half of one. `fused_linear` of the dequantized
weight states what is computed. Norm, bias, gated activation, residual and the split along K are the same, and so is the scratch.

Three kinds of weights, by the type of their codes:

- int8 [N, K] and float8_e4m3fn [N, K], with scales float32 [N]. The numbers of the codes are exact in every type of x, so they are
  multiplied as they are. The sums are scaled.
- uint8 [N, K128 / 2], codes of 4 bits (`packed`), with scales bfloat16 [K128 / 128, N, 2 * S]. K128 is K, filled up to a multiple
  of 128. A weight is (code - 8) * scale + zero, rounded to the type of x. S groups of 128 / S inputs have a scale and a zero each,
  side by side. So 128 inputs of an output are 64 bytes of codes, and 4 * S of scales.

Floats of 8 bits are read as their bits (`float8`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.float8 import widened
from actorllm_kernels.launcher import launch
from actorllm_kernels.silu_mul import ACTIVATIONS
from actorllm_kernels.skinny_gemm import SplitScratch, finish_tile, num_parts

MAX_ROWS = 32
"""Of x, in one launch of `quantized_gemm`. For more, tiles of x leave no registers for codes and their numbers."""
BLOCK = 128
"""Inputs whose codes of 4 bits are side by side."""
PIECE = 16
"""Inputs in the lower halves of neighbouring bytes; as many follow in the upper halves."""


def packed(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of 4 bits as the kernel reads them.

    Arguments:
        codes: uint8 [out_features, in_features], 0 to 15.
        scales, zeros: [out_features, in_features / group]; group: 32, 64 or 128.

    Returns:
        Codes, uint8, and scales, in the type of the scales; see the module docstring.
    """
    num_outputs, num_inputs = codes.shape
    group, missing = num_inputs // scales.shape[1], -num_inputs % BLOCK
    pieces = torch.nn.functional.pad(codes, (0, missing)).view(num_outputs, -1, 2, PIECE)
    made = (pieces[:, :, 0] | (pieces[:, :, 1] << 4)).flatten(1).contiguous()
    both = torch.nn.functional.pad(torch.stack((scales, zeros), 2), (0, 0, 0, missing // group))
    return made, both.view(num_outputs, -1, 2 * (BLOCK // group)).transpose(0, 1).contiguous()


@triton.jit
def dequantize_halves(codes, pairs, ROWS: tl.constexpr, S: tl.constexpr):
    """Lower and upper halves of codes [ROWS, 64] as float32. pairs: int32 [ROWS, S], a scale and above it a zero, in bfloat16."""
    scale, zero = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    low = tl.reshape((codes & 15).to(tl.float32) - 8.0, [ROWS, S, 64 // S])
    high = tl.reshape((codes >> 4).to(tl.float32) - 8.0, [ROWS, S, 64 // S])
    low = low * scale[:, :, None] + zero[:, :, None]
    high = high * scale[:, :, None] + zero[:, :, None]
    return tl.reshape(low, [ROWS, 64]), tl.reshape(high, [ROWS, 64])


@triton.jit
def add_int4(acc, codes_ptr, scales_ptr, row, block, low_x, high_x, K128: tl.constexpr, ROWS: tl.constexpr,
             NUM_ROWS: tl.constexpr, S: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """acc + the products of 128 inputs with these rows of the weight."""
    byte, group = tl.arange(0, 64), tl.arange(0, S)
    codes = tl.load(codes_ptr + row[:, None] * (K128 // 2) + block * 64 + byte[None, :])
    pairs = tl.load(scales_ptr + (block.to(tl.int64) * NUM_ROWS + row)[:, None] * S + group[None, :])
    low, high = dequantize_halves(codes, pairs, ROWS, S)
    if not UPCAST:
        low, high = low.to(low_x.dtype), high.to(high_x.dtype)
    acc = tl.dot(low, low_x, acc, input_precision="ieee")
    return tl.dot(high, high_x, acc, input_precision="ieee")


@triton.jit
def normed(x, weight_norm_ptr, column, is_column, squares):
    """x times the weight of the norm, and the sums of squares with those of x."""
    wide = x.to(tl.float32)
    norm = tl.load(weight_norm_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    return (wide * norm[:, None]).to(x.dtype), squares + tl.sum(wide * wide, 0)


@triton.jit(do_not_specialize=["num_rows"])
def quantized_gemm_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    weight_norm_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """S: groups of 4 bits in 128 inputs; 0: codes have 8 bits."""
    IS_GATED: tl.constexpr = ACTIVATION != ""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    K128: tl.constexpr = (K + 127) // 128 * 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    is_n = n < N
    is_m = m < num_rows
    SHARE: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    first = tl.program_id(1) * SHARE
    last = tl.minimum(first + SHARE, K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    # Rows outside of the weight read row 0, and are not stored.
    row = tl.where(is_n, n, 0).to(tl.int64)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_K):
        if S:
            byte = tl.arange(0, 64)
            column = start + byte // 16 * 32 + byte % 16  # of the lower halves
            upper = column + 16
            low_x = tl.load(
                x_ptr + m[None, :] * K + column[:, None], mask=is_m[None, :] & (column < K)[:, None], other=0.0
            )
            high_x = tl.load(
                x_ptr + m[None, :] * K + upper[:, None], mask=is_m[None, :] & (upper < K)[:, None], other=0.0
            )
            if HAS_NORM:
                low_x, squares = normed(low_x, weight_norm_ptr, column, column < K, squares)
                high_x, squares = normed(high_x, weight_norm_ptr, upper, upper < K, squares)
            if UPCAST:
                low_x, high_x = low_x.to(tl.float32), high_x.to(tl.float32)
            block = start // 128
            NUM_ROWS: tl.constexpr = 2 * N if IS_GATED else N
            acc = add_int4(acc, codes_ptr, scales_ptr, row, block, low_x, high_x, K128, BLOCK_N, NUM_ROWS, S, UPCAST)
            if IS_GATED:
                acc_up = add_int4(
                    acc_up, codes_ptr, scales_ptr, row + N, block, low_x, high_x, K128, BLOCK_N, NUM_ROWS, S, UPCAST
                )
        else:
            column = start + k
            is_column = column < K
            x = tl.load(x_ptr + m[None, :] * K + column[:, None], mask=is_m[None, :] & is_column[:, None], other=0.0)
            if HAS_NORM:
                x, squares = normed(x, weight_norm_ptr, column, is_column, squares)
            if UPCAST:
                x = x.to(tl.float32)
            at = codes_ptr + row[:, None] * K + column[None, :]
            codes = tl.load(at) if EVEN_K else tl.load(at, mask=is_column[None, :], other=0)
            acc = tl.dot(widened(codes, IS_FLOAT, x.dtype), x, acc, input_precision="ieee")
            if IS_GATED:
                codes = tl.load(at + N * K) if EVEN_K else tl.load(at + N * K, mask=is_column[None, :], other=0)
                acc_up = tl.dot(widened(codes, IS_FLOAT, x.dtype), x, acc_up, input_precision="ieee")
    if not S:
        acc *= tl.load(scales_ptr + row)[:, None]
        if IS_GATED:
            acc_up *= tl.load(scales_ptr + row + N)[:, None]

    finish_tile(
        acc, acc_up, squares, n, m, is_n, is_m, bias_ptr, residual_ptr, y_ptr, partials_ptr, counters_ptr, eps,
        N, K, BLOCK_M, BLOCK_N, SPLIT, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "num_outputs"])
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    y_ptr,
    first,
    num_outputs,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows first..first+num_outputs-1 of the weight in the type of y [num_outputs, K]; BLOCK_N of them and 128 inputs a program."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    is_n = n < num_outputs
    row = tl.where(is_n, first + n, 0).to(tl.int64)
    at = y_ptr + n.to(tl.int64)[:, None] * K
    if S:
        byte, group = tl.arange(0, 64), tl.arange(0, S)
        K128: tl.constexpr = (K + 127) // 128 * 128
        codes = tl.load(codes_ptr + row[:, None] * (K128 // 2) + block * 64 + byte[None, :])
        pairs = tl.load(scales_ptr + (block.to(tl.int64) * N + row)[:, None] * S + group[None, :])
        low, high = dequantize_halves(codes, pairs, BLOCK_N, S)
        column = block * 128 + byte // 16 * 32 + byte % 16
        tl.store(at + column[None, :], low.to(y_ptr.dtype.element_ty), mask=is_n[:, None] & (column < K)[None, :])
        column += 16
        tl.store(at + column[None, :], high.to(y_ptr.dtype.element_ty), mask=is_n[:, None] & (column < K)[None, :])
    else:
        column = block * 128 + tl.arange(0, 128)
        mask = is_n[:, None] & (column < K)[None, :]
        codes = tl.load(codes_ptr + row[:, None] * K + column[None, :], mask=mask, other=0)
        weight = widened(codes, IS_FLOAT, tl.float32) * tl.load(scales_ptr + row)[:, None]
        tl.store(at + column[None, :], weight.to(y_ptr.dtype.element_ty), mask=mask)


def layout(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    """Codes and scales as Triton reads them, groups of 4 bits in 128 inputs or 0, and whether codes are floats.

    Pieces of 4 bytes are the least that can be loaded ahead: a scale and its zero are one.
    """
    if codes.dtype == torch.uint8:
        return codes, scales.view(torch.int32), scales.shape[-1] // 2, False
    if codes.dtype == torch.float8_e4m3fn:
        return codes.view(torch.uint8), scales, 0, True
    return codes, scales, 0, False


def shape_class(num_outputs: int, is_gated: bool) -> str:
    """Of the configuration table. num_outputs: columns of y."""
    width = "narrow" if num_outputs < 2048 else "medium" if num_outputs < 8192 else "wide"
    return f"{width}-gated" if is_gated else width


def quantized_gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    y: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    scratch: SplitScratch | None = None,
    split: int | None = None,
    pdl: bool = False,
) -> None:
    """y = activation(rmsnorm(x) @ weight.T + bias) + residual, each part of it optional.

    codes, scales: see the module docstring; scales of floats of 8 bits: times `FLOAT8_SCALE`. All else as in `skinny_gemm`; y
    may have a wider type than x.
    """
    num_rows, in_features = x.shape
    out_features = y.shape[1]
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows are too many for quantized_gemm, which takes {MAX_ROWS}")
    if activation and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    codes, scales, groups, is_float = layout(codes, scales)
    kind = f"{shape_class(out_features, bool(activation))}-{4 if groups else 8}"
    config = dict(lookup("quantized_gemm", kind, x.device))
    num_tiles = triton.cdiv(out_features, config["BLOCK_N"])
    if scratch is None:
        split = 1
    elif split is None:
        split = num_parts(num_tiles, in_features, config["BLOCK_K"], x.device)
    launch(
        quantized_gemm_kernel,
        (num_tiles, split),
        (
            x,
            codes,
            scales,
            x if norm is None else norm,
            x if bias is None else bias,
            x if residual is None else residual,
            y,
            x if scratch is None else scratch.partials,
            x if scratch is None else scratch.counters,
            num_rows,
            eps,
        ),
        N=out_features,
        K=in_features,
        S=groups,
        IS_FLOAT=is_float,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        SPLIT=split,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        UPCAST=x.device.type == "cpu",
        **dependent(pdl, x.device),
        **config,
    )


def dequantize(codes: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, first: int, *, pdl: bool = False) -> None:
    """y = rows first.. of the weight, [num_outputs, in_features], in its type."""
    num_outputs, in_features = y.shape
    num_rows = codes.shape[0]
    codes, scales, groups, is_float = layout(codes, scales)
    config = dict(lookup("dequantize", "*", y.device))
    launch(
        dequantize_kernel,
        (triton.cdiv(num_outputs, config["BLOCK_N"]), triton.cdiv(in_features, BLOCK)),
        (codes, scales, y, first, num_outputs),
        N=num_rows,
        K=in_features,
        S=groups,
        IS_FLOAT=is_float,
        **dependent(pdl, y.device),
        **config,
    )
