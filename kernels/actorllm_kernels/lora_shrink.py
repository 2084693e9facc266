"""Inputs of a step times the A matrices of the adapter of each token (reference: `reference.lora_shrink`).

Adapters are in slots, counted from 1; slot 0 is the base. `down` has the A matrices of all slots, those of the targets of one
product side by side. The slot of a token is found by the row of the state table that its request has. So a recorded step does
not change when requests with other adapters come.

A program multiplies BLOCK_M tokens with some rows of one slot's matrix. Tokens of other slots count as zeros, and are not stored.
A program without a token of its slot ends at once. So each matrix is read once for BLOCK_M tokens, whatever their order. No sum
has a term of another token.

For few tokens K is divided among programs, because the matrices are too small to keep a GPU busy otherwise. Each leaves its part
of the sums in `hidden`, and `lora_expand` adds the parts up in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch

FEW_TOKENS = 64
"""Up to so many, K is divided."""
SHARE = 512
"""Of K, that a program takes then at most."""
STEP = 128
"""A share is a multiple of it; so it is a multiple of every BLOCK_K."""


def num_parts(num_tokens: int, in_features: int) -> int:
    """Among how many programs K is divided."""
    return -(-in_features // SHARE) if num_tokens <= FEW_TOKENS else 1


def part_size(in_features: int, parts: int) -> int:
    """Inputs in each part but the last."""
    return -(-in_features // (parts * STEP)) * STEP


@triton.jit
def has_adapter(token_rows_ptr, adapters_ptr, m, num_tokens, slot):
    """Which of the tokens m have the adapter of this slot."""
    row = tl.load(token_rows_ptr + m, mask=m < num_tokens, other=-1)
    return tl.load(adapters_ptr + row, mask=row >= 0, other=0) == slot


@triton.jit(do_not_specialize=["num_tokens"])
def lora_shrink_kernel(
    x_ptr,
    down_ptr,
    token_rows_ptr,
    adapters_ptr,
    hidden_ptr,
    num_tokens,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0) % PARTS
    m = tl.program_id(0) // PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    slot = tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    is_m = has_adapter(token_rows_ptr, adapters_ptr, m, num_tokens, slot + 1)
    if tl.max(is_m.to(tl.int32), 0) > 0:
        is_n = n < WIDTH
        wide_m = m.to(tl.int64)
        rows = (slot * WIDTH + tl.where(is_n, n, 0)).to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(part * SIZE, tl.minimum((part + 1) * SIZE, K), BLOCK_K):
            column = start + k
            is_k = column < K
            x = tl.load(x_ptr + wide_m[:, None] * K + column[None, :], mask=is_m[:, None] & is_k[None, :], other=0.0)
            w = tl.load(down_ptr + rows[None, :] * K + column[:, None], mask=is_k[:, None], other=0.0)
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        at = hidden_ptr + (wide_m[:, None] * PARTS + part) * WIDTH + n[None, :]
        tl.store(at, acc, mask=is_m[:, None] & is_n[None, :])


def lora_shrink(
    x: torch.Tensor,
    down: torch.Tensor,
    token_rows: torch.Tensor,
    adapters: torch.Tensor,
    hidden: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Of every token that has an adapter, the sums of its inputs times each row of that adapter's matrix.

    Arguments:
        x: [num_tokens, in_features], contiguous.
        down: [num_slots, width, in_features], of the type of x; width: the ranks of all targets of the product.
        token_rows: int32 [num_tokens], the row of each token in `adapters`, or -1.
        adapters: int32 [num_rows], the slot of each row, counted from 1; 0: it has none.
        hidden: float32, the beginning of which becomes [num_tokens, num_parts(num_tokens, in_features), width]. What tokens
            without adapters have there stays as it was.
    """
    num_tokens, in_features = x.shape
    num_slots, width, _ = down.shape
    parts = num_parts(num_tokens, in_features)
    if hidden.numel() < num_tokens * parts * width:
        raise ValueError(f"hidden has {hidden.numel()} numbers, and {num_tokens * parts * width} are needed")
    config = dict(lookup("lora_shrink", "few" if num_tokens <= FEW_TOKENS else "many", x.device))
    launch(
        lora_shrink_kernel,
        (triton.cdiv(num_tokens, config["BLOCK_M"]) * parts, triton.cdiv(width, config["BLOCK_N"]), num_slots),
        (x, down, token_rows, adapters, hidden, num_tokens),
        K=in_features,
        WIDTH=width,
        PARTS=parts,
        SIZE=part_size(in_features, parts),
        UPCAST=x.device.type == "cpu",
        **dependent(pdl, x.device),
        **config,
    )
