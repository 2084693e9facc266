"""Clears what some tokens of a step have written to the cache (reference: `reference.clear_pages`).

The cache must be finite everywhere (see `attn_decode`). Which tokens are at fault is known on the device at the end of their
step, and this is the last thing in it. The next owner of the block, in a step that is launched already, finds zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit(do_not_specialize=["num_layers"])
def kv_clear_kernel(
    pool_ptr,
    slots_ptr,
    is_finite_ptr,
    num_layers,
    layer_stride: tl.int64,
    block_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (tl.load(is_finite_ptr + token) == 0) & (slot >= 0):
        first = pool_ptr + (slot // PAGE) * block_stride + (slot % PAGE) * DIM
        zero = tl.zeros([BLOCK], tl.float32).to(pool_ptr.dtype.element_ty)
        for _ in range(num_layers):
            for start in range(0, HEADS * DIM, BLOCK):
                element = start + tl.arange(0, BLOCK)
                at = first + (element // DIM) * (PAGE * DIM) + element % DIM
                tl.store(at, zero, mask=element < HEADS * DIM)
            first += layer_stride


def kv_clear(pool: torch.Tensor, slots: torch.Tensor, is_finite: torch.Tensor, *, pdl: bool = False) -> None:
    """Zeros where is_finite is 0.

    pool: [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous within a block. slots: [num_tokens]
    integers, block * block_size + offset, or -1 for a token that was not written. is_finite: [num_tokens] integers.
    """
    num_layers, _, two, num_kv_heads, page, dim = pool.shape
    launch(
        kv_clear_kernel,
        (slots.shape[0],),
        (pool, slots, is_finite, num_layers, pool.stride(0), pool.stride(1)),
        HEADS=two * num_kv_heads,
        DIM=dim,
        PAGE=page,
        **dependent(pdl, pool.device),
        **lookup("kv_clear", "*", pool.device),
    )
