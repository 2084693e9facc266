"""Pairs of a token and one of its experts, in the order of experts (reference: `reference.grouped_pairs`).

A program finds the pairs of one expert. It counts those of the experts before, and puts its own behind them in their order. So
nothing is added by several programs at once, and the order is always the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit(do_not_specialize=["num_pairs", "first"])
def group_pairs_kernel(
    numbers_ptr,
    order_ptr,
    starts_ptr,
    num_pairs,
    first,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + place
        number = tl.load(numbers_ptr + pair, mask=pair < num_pairs, other=-1)
        before += ((number >= first) & (number < first + expert)).to(tl.int32)
    begin = tl.sum(before, 0)
    end = begin
    for start in range(0, num_pairs, BLOCK):
        pair = start + place
        number = tl.load(numbers_ptr + pair, mask=pair < num_pairs, other=-1)
        is_mine = number == first + expert
        found = is_mine.to(tl.int32)
        tl.store(order_ptr + end + tl.cumsum(found, 0) - 1, pair, mask=is_mine)
        end += tl.sum(found, 0)
    tl.store(starts_ptr + expert, begin)
    tl.store(starts_ptr + expert + 1, end, mask=expert == tl.num_programs(0) - 1)


def group_pairs(
    numbers: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, first: int, *, pdl: bool = False
) -> None:
    """Which pairs are of which expert.

    Arguments:
        numbers: int32 [num_tokens, num_active], contiguous: the experts of each token. A pair is a place in it.
        order: int32, at least as long: becomes the pairs of the first expert here, then those of the next.
        starts: int32 [num_experts + 1]: becomes where each expert begins in it, and the end of the last.
        first: number of the first expert here; pairs of experts that are not here are left out.
    """
    launch(
        group_pairs_kernel,
        (len(starts) - 1,),
        (numbers, order, starts, numbers.numel(), first),
        **dependent(pdl, numbers.device),
        **lookup("group_pairs", "*", numbers.device),
    )
