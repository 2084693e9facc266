"""RMSNorm of rows, with the residual added first if there is one (reference: `reference.rmsnorm`).

One program per row, which it reads once. Sums are in float32. The residual stream is rounded to its own type before the
norm sees it, as it would be between two operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit
def rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    eps,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * STRIDE + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * SIZE + columns, mask=mask, other=0.0)
        total = x.to(tl.float32) + residual.to(tl.float32)
        x = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * SIZE + columns, x, mask=mask)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(y_ptr + row * Y_STRIDE + columns, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    y: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """y = norm(x) * weight; with a residual: residual += x, and y is the norm of that.

    x, y, residual: [num_tokens, hidden_size]; y may be x. x and y may be columns of wider rows; the residual is
    contiguous. weight: [hidden_size]. pdl: launch as a dependent of the kernel before.
    """
    num_tokens, size = x.shape
    config = {**lookup("rmsnorm", "small" if size <= 2048 else "large", x.device), **dependent(pdl, x.device)}
    launch(
        rmsnorm_kernel,
        (num_tokens,),
        (x, x if residual is None else residual, weight, y, eps),
        SIZE=size,
        STRIDE=x.stride(0),
        Y_STRIDE=y.stride(0),
        BLOCK=triton.next_power_of_2(size),
        HAS_RESIDUAL=residual is not None,
        **config,
    )
