"""What the experts of a token give, weighted and added up in the order of its choice (reference: `reference.summed_experts`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit(do_not_specialize=["first", "end"])
def sum_experts_kernel(
    found_ptr,
    numbers_ptr,
    weights_ptr,
    beside_ptr,
    y_ptr,
    first,
    end,
    SIZE: tl.constexpr,
    ACTIVE: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(ACTIVE):
        pair = token * ACTIVE + i
        number = tl.load(numbers_ptr + pair)
        num_read = tl.where((number >= first) & (number < end), SIZE, 0)
        x = tl.load(found_ptr + pair * SIZE + column, mask=column < num_read, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * x
    if HAS_BESIDE:
        total += tl.load(beside_ptr + token * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * SIZE + column, total.to(y_ptr.dtype.element_ty), mask=column < SIZE)


def sum_experts(
    found: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
    y: torch.Tensor,
    first: int,
    end: int,
    beside: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """y = the sum of the results of each token's experts times their weights, in float32 inside.

    Arguments:
        found: [num_tokens * num_active, size], by pair; of experts that are not here it is not read.
        numbers, weights: int32 and float32 [num_tokens, num_active].
        y: [num_tokens, size], contiguous.
        first, end: numbers of the experts that are here.
        beside: [num_tokens, size], added as it is; None: nothing.
    """
    num_tokens, size = y.shape
    config = lookup("sum_experts", "*", y.device)
    launch(
        sum_experts_kernel,
        (num_tokens, triton.cdiv(size, config["BLOCK"])),
        (found, numbers, weights, y if beside is None else beside, y, first, end),
        SIZE=size,
        ACTIVE=numbers.shape[1],
        HAS_BESIDE=beside is not None,
        **dependent(pdl, y.device),
        **config,
    )
