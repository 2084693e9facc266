"""x @ weight.T for few rows, with what comes before and after it in the same launch (reference: `reference.fused_linear`).

For a handful of rows a product costs the reading of its weight and a launch. So the norm in front of it, and the bias, gated
activation or residual behind it, are done here. The weight's rows are the long side of the tile: a tile of the result is
[BLOCK_N, BLOCK_M], transposed when it is stored. Padding a few rows of x to 16 on the short side costs nothing. The norm needs no
pass of its own: the sum of squares is gathered in the loop, and scales the result.

One row is `gemv`'s. A product with fewer tiles than the GPU has multiprocessors is split along K, so that all of them read the
weight. The programs of a tile leave their sums in `SplitScratch`. The last of them to arrive adds these up, in the order of K, and
does the rest. So the result does not depend on which one that is.

As a dependent launch, a program asks for its weights before it waits for the kernel in front of it. They are constant, and
the memory would be idle otherwise. All programs together ask for no more than a part of the second-level cache holds.

`is_skinny` says for which shapes this is to be used; others go to cuBLAS (`torch.nn.functional.linear`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup, num_multiprocessors, table
from actorllm_kernels.gemv import gemv
from actorllm_kernels.launcher import launch
from actorllm_kernels.silu_mul import ACTIVATIONS, activate

MAX_ROWS = 64
"""Of x, in one launch."""
PREFETCH_BYTES = 16 << 20
"""That the programs of a launch ask for before they wait; the second-level cache has 40 MiB or more where they can wait."""
UNROLLED = tl.constexpr(4)
"""Parts of a split product that are added up with all their reads under way; more would be too much code."""
MAX_RESIDENT = 3
"""Programs of a product on a multiprocessor, roughly."""
NARROW = 2048
"""Outputs below which this kernel takes several rows: wider ones are cuBLAS's, which reads at nearly the whole bandwidth there."""


@triton.jit
def prefetch_rows(weight_ptr, row, is_row, first, last, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Asks for columns first..last-1 of these rows of a 16-bit weight [.., K] in the second-level cache, by lines of 128 bytes.

    COLUMNS: at least last - first, and near it, so that few lines are asked for twice.
    """
    LINES: tl.constexpr = 16 if COLUMNS >= 1024 else (4 if COLUMNS >= 256 else 1)
    line = tl.arange(0, LINES) * 64
    for start in range(first, last, LINES * 64):
        column = tl.minimum(start + line, last - 1)
        at = weight_ptr + tl.where(is_row, row, 0).to(tl.int64)[:, None] * K + column[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\nmov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def finish(
    acc,
    acc_up,
    squares,
    n,
    m,
    is_n,
    is_m,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """From the sums of a tile [BLOCK_N, BLOCK_M] to its part of y."""
    IS_GATED: tl.constexpr = ACTIVATION != ""
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


@triton.jit
def add_part(
    acc,
    acc_up,
    squares,
    part,
    inside,
    m,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """A part is not read from the cache of this multiprocessor, which may have what was there before."""
    acc += tl.load(part + inside, cache_modifier=".cg")
    if IS_GATED:
        acc_up += tl.load(part + TILE + inside, cache_modifier=".cg")
    if HAS_NORM:
        squares += tl.load(part + (PART - BLOCK_M) + m, cache_modifier=".cg")
    return acc, acc_up, squares


@triton.jit
def finish_tile(
    acc,
    acc_up,
    squares,
    n,
    m,
    is_n,
    is_m,
    bias_ptr,
    residual_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """`finish` of a tile whose share of K this program has; of several programs, the last one adds up what all have left."""
    IS_GATED: tl.constexpr = ACTIVATION != ""
    if SPLIT > 1:
        # A part: the sums of a tile, those of the other factor behind them, and the squares.
        TILE: tl.constexpr = BLOCK_N * BLOCK_M
        PART: tl.constexpr = (TILE * 2 if IS_GATED else TILE) + BLOCK_M
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        parts = partials_ptr + tl.program_id(0) * (SPLIT * PART)
        mine = parts + tl.program_id(1) * PART
        tl.store(mine + inside, acc)
        if IS_GATED:
            tl.store(mine + TILE + inside, acc_up)
        if HAS_NORM:
            tl.store(mine + (PART - BLOCK_M) + m, squares)
        tl.debug_barrier()  # all threads have stored before one of them counts
        arrived = tl.atomic_add(counters_ptr + tl.program_id(0), 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            tl.store(counters_ptr + tl.program_id(0), 0)  # as the next launch must find it
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_M], tl.float32)
            if SPLIT <= UNROLLED:
                for i in tl.static_range(SPLIT):  # all parts are on their way before the first is there
                    acc, acc_up, squares = add_part(
                        acc, acc_up, squares, parts + i * PART, inside, m, TILE, PART, BLOCK_M, IS_GATED, HAS_NORM
                    )
            else:
                for i in range(SPLIT):
                    acc, acc_up, squares = add_part(
                        acc, acc_up, squares, parts + i * PART, inside, m, TILE, PART, BLOCK_M, IS_GATED, HAS_NORM
                    )
            finish(
                acc, acc_up, squares, n, m, is_n, is_m, bias_ptr, residual_ptr, y_ptr, eps,
                N, K, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
            )  # fmt: skip
    else:
        finish(
            acc, acc_up, squares, n, m, is_n, is_m, bias_ptr, residual_ptr, y_ptr, eps,
            N, K, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def skinny_gemm_kernel(
    x_ptr,
    weight_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    IS_GATED: tl.constexpr = ACTIVATION != ""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    is_n = n < N
    is_m = m < num_rows
    # The share of K that this program has: whole steps of the loop.
    SHARE: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    first = tl.program_id(1) * SHARE
    last = tl.minimum(first + SHARE, K)
    if AHEAD:
        near = tl.minimum(first + AHEAD, last)
        prefetch_rows(weight_ptr, n, is_n, first, near, K, AHEAD)
        if IS_GATED:
            prefetch_rows(weight_ptr, n + N, is_n, first, near, K, AHEAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    # Rows outside of the weight read row 0, and are not stored: a load without a mask is the faster one.
    row = tl.where(is_n, n, 0).to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_K):
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

    finish_tile(
        acc, acc_up, squares, n, m, is_n, is_m, bias_ptr, residual_ptr, y_ptr, partials_ptr, counters_ptr, eps,
        N, K, BLOCK_M, BLOCK_N, SPLIT, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """What the programs of a split product leave for the last of them. Launches one after the other share one.

    Whatever way a launch ended, but for a failure of the GPU, its counters are 0 again.
    """

    partials: torch.Tensor
    """float32 [any]."""
    counters: torch.Tensor
    """int32 [num_tiles], 0 between launches."""

    @classmethod
    def empty(cls, device: torch.device) -> SplitScratch:
        """For every product on this device: split ones have fewer tiles than it has multiprocessors."""
        most = num_multiprocessors(device)
        widest = max(
            config["BLOCK_N"]
            for kernel in ("skinny_gemm", "quantized_gemm")  # which share one
            for of in table()[kernel].values()
            for config in of.values()
        )
        part = (2 * widest + 1) * MAX_ROWS
        return cls(
            torch.empty(2 * most * part, dtype=torch.float32, device=device),
            torch.zeros(most, dtype=torch.int32, device=device),
        )


def num_parts(num_tiles: int, in_features: int, block_k: int, device: torch.device) -> int:
    """How many programs share a tile: as many as fill the GPU, with a step of the loop each at least."""
    most: int = triton.cdiv(in_features, block_k)
    as_fill: int = triton.cdiv(num_multiprocessors(device), num_tiles)
    return min(as_fill, most)


def columns_ahead(num_programs: int, num_rows: int, device: torch.device) -> int:
    """How many columns of its rows of a 16-bit weight a program asks for ahead: whole lines of 128 bytes, one at least."""
    at_once = min(num_programs, MAX_RESIDENT * num_multiprocessors(device))
    return max(1, PREFETCH_BYTES // (at_once * num_rows * 128)) * 64


def is_skinny(num_rows: int, num_outputs: int, device: torch.device) -> bool:
    """Whether a product of this shape is ours; num_outputs: columns of y."""
    most = int(lookup("skinny_gemm", "*", device)["MAX_ROWS"])
    return num_rows <= (most if num_outputs < NARROW else min(most, 1))


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
    scratch: SplitScratch | None = None,
    split: int | None = None,
    pdl: bool = False,
) -> None:
    """y = rmsnorm(x) @ weight.T + bias + residual, each part of it optional.

    x: [num_rows, in_features], at most 64 rows; weight: [out_features, in_features]; y, residual: [num_rows, out_features],
    y may be the residual. norm: weight of the norm [in_features]. activation: one of `silu_mul.ACTIVATIONS`; then weight and
    bias have the gate's out_features first, those of the other factor behind them, and y is their gated product.
    scratch: without it nothing is split. split: into so many parts, for tests; None: as many as fill the GPU.
    """
    num_rows, in_features = x.shape
    out_features = y.shape[1]
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows are too many for skinny_gemm, which takes {MAX_ROWS}")
    if activation and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if num_rows == 1 and (split is None or split == 1):
        gemv(x, weight, y, norm=norm, eps=eps, bias=bias, residual=residual, activation=activation, pdl=pdl)
        return
    config = dict(lookup("skinny_gemm", "*", x.device))
    config.pop("MAX_ROWS", None)
    waiting = dependent(pdl, x.device)
    prefetches = bool(config.pop("PREFETCH", 1)) and waiting["PDL"] and x.element_size() == 2
    num_tiles = triton.cdiv(out_features, config["BLOCK_N"])
    num_rows_read = config["BLOCK_N"] * (2 if activation else 1)
    if scratch is None:
        split = 1
    elif split is None:
        split = num_parts(num_tiles, in_features, config["BLOCK_K"], x.device)
    launch(
        skinny_gemm_kernel,
        (num_tiles, split),
        (
            x,
            weight,
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
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        SPLIT=split,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        UPCAST=x.device.type == "cpu",
        AHEAD=columns_ahead(num_tiles * split, num_rows_read, x.device) if prefetches else 0,
        **waiting,
        **config,
    )
