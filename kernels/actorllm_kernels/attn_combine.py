"""Merges what several programs of `attn_decode` found of one sequence (reference: `reference.attention`).

One program per token and head. It recomputes from the plan which programs had a part, and weights their results by their
logsumexps. Where one program had the whole sequence there is nothing to do, and where a row is padding the result is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.attn_decode import LOG2_E, LOWEST
from actorllm_kernels.configs import dependent, lookup


@triton.jit(do_not_specialize=["num_rows"])
def attn_combine_kernel(
    out_ptr,
    partials_ptr,
    partial_lse_ptr,
    ends_ptr,
    quota_ptr,
    weight_sinks_ptr,
    num_rows,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    q_head = tl.program_id(1)
    i = token // Q_LEN
    head = q_head // GROUP
    row = (token % Q_LEN) * GROUP + q_head % GROUP  # of the tile of queries
    d = tl.arange(0, DIM_BLOCK)
    in_head = d < DIM
    out_at = out_ptr + (token * (NUM_KV * GROUP) + q_head).to(tl.int64) * DIM + d
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tiles_per_head = tl.load(ends_ptr + num_rows)
    quota = tl.load(quota_ptr)
    begin = head * tiles_per_head + tl.load(ends_ptr + i)
    end = head * tiles_per_head + tl.load(ends_ptr + i + 1)
    if end == begin:
        tl.store(out_at, tl.zeros([DIM_BLOCK], tl.float32).to(out_ptr.dtype.element_ty), mask=in_head)
    else:
        first = begin // quota
        last = (end - 1) // quota
        if last > first:
            if HAS_SINKS:
                highest = tl.load(weight_sinks_ptr + q_head + tl.arange(0, 1)).to(tl.float32) * LOG2_E
                total = tl.full([1], 1.0, tl.float32)
            else:
                highest = tl.full([1], LOWEST, tl.float32)
                total = tl.zeros([1], tl.float32)
            acc = tl.zeros([DIM_BLOCK], tl.float32)
            for start in range(first, last + 1, PARTS):
                program = start + tl.arange(0, PARTS)
                is_part = program <= last
                # a program's second part is the one that it did not begin with
                part = program * 2 + ((program == first) & (begin > program * quota)).to(tl.int32)
                at = (part * (Q_LEN * GROUP) + row).to(tl.int64)
                lse = tl.load(partial_lse_ptr + at, mask=is_part, other=LOWEST)
                mask = is_part[:, None] & in_head[None, :]
                y = tl.load(partials_ptr + at[:, None] * DIM + d[None, :], mask=mask, other=0.0)
                higher = tl.maximum(highest, tl.max(lse, 0))
                shrink = tl.exp2(highest - higher)
                weight = tl.where(lse > LOWEST, tl.exp2(lse - higher), 0.0)
                acc = acc * shrink + tl.sum(weight[:, None] * y, 0)
                total = total * shrink + tl.sum(weight, 0)
                highest = higher
            tl.store(out_at, (acc / tl.where(total > 0, total, 1.0)).to(out_ptr.dtype.element_ty), mask=in_head)


def attn_combine(
    out: torch.Tensor,
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    ends: torch.Tensor,
    quota: torch.Tensor,
    num_kv_heads: int,
    *,
    sinks: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Completes the out of `attn_decode`, with the same arguments."""
    num_tokens, num_heads, dim = out.shape
    num_rows = ends.shape[0] - 1
    attn_combine_kernel[(num_tokens, num_heads)](
        out,
        partials,
        partial_lse,
        ends,
        quota,
        out if sinks is None else sinks,
        num_rows,
        NUM_KV=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        Q_LEN=num_tokens // num_rows,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        HAS_SINKS=sinks is not None,
        **dependent(pdl, out.device),
        **lookup("attn_combine", "*", out.device),
    )
