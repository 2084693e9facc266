"""Products of many experts in one launch: each pair of a token and an expert with the weight of that expert.

The reference is `reference.grouped_linear`. `group_pairs` has put the pairs in the order of experts. A tile is BLOCK_M pairs of one
expert and BLOCK_N outputs. Which expert that is, a program finds in the starts of the experts. So the grid is fixed: it has as many
tiles as there can be, and a program behind the last one ends at once. Experts without a pair are not read.

The weights of all experts are one tensor: numbers of the type of x, or codes of 8 or 4 bits as `quantized_gemm` reads them. With an
activation an expert has the gate's outputs first and those of the other factor behind them. No sum has a term of another token, so
a result does not depend on which other tokens an expert has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.float8 import widened
from actorllm_kernels.launcher import launch
from actorllm_kernels.quantized_gemm import add_int4, layout
from actorllm_kernels.silu_mul import ACTIVATIONS, activate

FEW_TOKENS = 64
"""Up to so many, tiles are for experts with a few pairs."""

SWIGLU = "swiglu"
"""The activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with gate and up within a limit."""


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of the gate, times the other factor."""
    if ACTIVATION == "swiglu":
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * (gate * tl.sigmoid(ALPHA * gate))
    return activate(gate, ACTIVATION) * up


@triton.jit
def grouped_gemm_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    y_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PER_ROW: tl.constexpr,
    S: tl.constexpr,
    IS_CODES: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """PER_ROW: pairs that read one row of x. S: groups of 4 bits in 128 inputs; 0: there are no codes of 4 bits."""
    IS_GATED: tl.constexpr = ACTIVATION != ""
    ROWS: tl.constexpr = 2 * N if IS_GATED else N  # of an expert's weight
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    K128: tl.constexpr = (K + 127) // 128 * 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    e = tl.arange(0, PADDED)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first_of = tl.load(starts_ptr + e, mask=e < EXPERTS, other=0)
    end_of = tl.load(starts_ptr + e + 1, mask=e < EXPERTS, other=0)
    tiles = (end_of - first_of + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        before = tl.sum(tl.where(e < expert, tiles, 0), 0)
        place = tl.load(starts_ptr + expert) + (tile - before) * BLOCK_M + m
        is_m = place < tl.load(starts_ptr + expert + 1)
        pair = tl.load(order_ptr + place, mask=is_m, other=0).to(tl.int64)
        x_row = pair // PER_ROW * K
        is_n = n < N
        wide = expert.to(tl.int64)
        row = tl.where(is_n, n, 0).to(tl.int64)  # rows outside of the weight read row 0, and are not stored
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, K, BLOCK_K):
            if S:
                byte = tl.arange(0, 64)
                column = start + byte // 16 * 32 + byte % 16  # of the lower halves
                upper = column + 16
                low_x = tl.load(
                    x_ptr + x_row[None, :] + column[:, None], mask=is_m[None, :] & (column < K)[:, None], other=0.0
                )
                high_x = tl.load(
                    x_ptr + x_row[None, :] + upper[:, None], mask=is_m[None, :] & (upper < K)[:, None], other=0.0
                )
                if UPCAST:
                    low_x, high_x = low_x.to(tl.float32), high_x.to(tl.float32)
                block = start // 128
                codes, scales = weight_ptr + wide * (ROWS * (K128 // 2)), scales_ptr + wide * (K128 // 128 * ROWS * S)
                acc = add_int4(acc, codes, scales, row, block, low_x, high_x, K128, BLOCK_N, ROWS, S, UPCAST)
                if IS_GATED:
                    acc_up = add_int4(
                        acc_up, codes, scales, row + N, block, low_x, high_x, K128, BLOCK_N, ROWS, S, UPCAST
                    )
            else:
                column = start + k
                x_mask = is_m[None, :] if EVEN_K else is_m[None, :] & (column < K)[:, None]
                x = tl.load(x_ptr + x_row[None, :] + column[:, None], mask=x_mask, other=0.0)  # [BLOCK_K, BLOCK_M]
                if UPCAST:
                    x = x.to(tl.float32)
                at = weight_ptr + (wide * ROWS + row)[:, None] * K + column[None, :]
                w = tl.load(at) if EVEN_K else tl.load(at, mask=(column < K)[None, :], other=0)
                if IS_CODES:
                    w = widened(w, IS_FLOAT, x.dtype)
                elif UPCAST:
                    w = w.to(tl.float32)
                acc = tl.dot(w, x, acc, input_precision="ieee")
                if IS_GATED:
                    w = tl.load(at + N * K) if EVEN_K else tl.load(at + N * K, mask=(column < K)[None, :], other=0)
                    if IS_CODES:
                        w = widened(w, IS_FLOAT, x.dtype)
                    elif UPCAST:
                        w = w.to(tl.float32)
                    acc_up = tl.dot(w, x, acc_up, input_precision="ieee")
        if IS_CODES and not S:
            acc *= tl.load(scales_ptr + wide * ROWS + row)[:, None]
            if IS_GATED:
                acc_up *= tl.load(scales_ptr + wide * ROWS + row + N)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + wide * ROWS + row).to(tl.float32)[:, None]
            if IS_GATED:
                acc_up += tl.load(bias_ptr + wide * ROWS + row + N).to(tl.float32)[:, None]
        if IS_GATED:
            acc = gated(acc, acc_up, ACTIVATION, ALPHA, LIMIT)
        at_y = y_ptr + pair[:, None] * N + n[None, :]
        tl.store(at_y, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=is_m[:, None] & is_n[None, :])


def num_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Tiles that so many pairs have at most: an expert with pairs has one that is not full."""
    return min(num_pairs, num_experts) + num_pairs // block_m


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    starts: torch.Tensor,
    y: torch.Tensor,
    num_tokens: int,
    *,
    activation: str = "",
    swiglu: tuple[float, float] | None = None,
    pdl: bool = False,
) -> None:
    """y[pair] = activation(x[row of the pair] @ weight[expert of the pair].T + bias[expert of the pair]).

    Arguments:
        x: [num_rows, in_features], contiguous; of len(y) // num_rows pairs in turn the row is the same.
        weight: [num_experts, out_features, in_features], in the type of x; or codes with scales, each as `quantized_gemm` has it.
        bias: [num_experts, out_features].
        order, starts: as `group_pairs` has left them.
        y: [num_pairs, out_features]; with an activation half as many. Pairs that are not in the order stay as they were.
        num_tokens: of the step; it decides on the tiles.
        activation: one of `silu_mul.ACTIVATIONS`, or "swiglu" with alpha and limit.
    """
    if activation and activation not in (*ACTIVATIONS, SWIGLU):
        raise ValueError(f"activation {activation!r} is none of {', '.join((*ACTIVATIONS, SWIGLU))}")
    if (activation == SWIGLU) != (swiglu is not None):
        raise ValueError("alpha and limit belong to the activation swiglu")
    num_experts, num_pairs, out_features = len(weight), len(y), y.shape[1]
    groups, is_float = 0, False
    if scales is not None:
        weight, scales, groups, is_float = layout(weight, scales)
    bits = 16 if scales is None else 4 if groups else 8
    config = dict(lookup("grouped_gemm", f"{'few' if num_tokens <= FEW_TOKENS else 'many'}-{bits}", x.device))
    alpha, limit = swiglu or (1.0, 1.0)
    launch(
        grouped_gemm_kernel,
        (triton.cdiv(out_features, config["BLOCK_N"]), num_tiles(num_pairs, num_experts, config["BLOCK_M"])),
        (x, weight, x if scales is None else scales, x if bias is None else bias, order, starts, y),
        N=out_features,
        K=x.shape[1],
        EXPERTS=num_experts,
        PADDED=triton.next_power_of_2(num_experts),
        PER_ROW=num_pairs // len(x),
        S=groups,
        IS_CODES=scales is not None,
        IS_FLOAT=is_float,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        ALPHA=alpha,
        LIMIT=limit,
        UPCAST=x.device.type == "cpu",
        **dependent(pdl, x.device),
        **config,
    )
