"""Between the products of a layer and attention over latents: the norm of the latent, the rotations, and the write to the cache
(reference: `reference.latent_token` and `reference.rotated_pairs`).

One program takes some heads of the query of a token, and turns the part of each that is rotated. The last one takes what the cache
holds of the token: its latent, normed, and the part that all heads share, rotated. Everything is computed in float32 and rounded
once. Pairs of a rotation are adjacent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit
def latent_rope_kv_kernel(
    queries_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    rotated_ptr,
    latents_ptr,
    query_stride,
    token_stride,
    block_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY // 2
    WIDTH: tl.constexpr = RANK + ROTARY
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_BLOCK)
    is_pair = pair < HALF
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=is_pair, other=1.0)
    sin = tl.load(sin_ptr + position * HALF + pair, mask=is_pair, other=0.0)

    if tl.program_id(1) < tl.num_programs(1) - 1:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        mask = (head < NUM_HEADS)[:, None] & is_pair[None, :]
        at = queries_ptr + token * query_stride + head[:, None] * (PLAIN + ROTARY) + PLAIN + 2 * pair[None, :]
        first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + 1, mask=mask, other=0.0).to(tl.float32)
        turned1 = (first * cos[None, :] - second * sin[None, :]).to(rotated_ptr.dtype.element_ty)
        turned2 = (second * cos[None, :] + first * sin[None, :]).to(rotated_ptr.dtype.element_ty)
        to = rotated_ptr + token * (NUM_HEADS * WIDTH) + head[:, None] * WIDTH + 2 * pair[None, :]
        tl.store(to, turned1, mask=mask)
        tl.store(to + 1, turned2, mask=mask)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            c = tl.arange(0, RANK_BLOCK)
            at = tokens_ptr + token * token_stride
            latent = tl.load(at + c, mask=c < RANK, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(latent * latent, 0) / RANK + eps)
            weight = tl.load(weight_ptr + c, mask=c < RANK, other=0.0).to(tl.float32)
            one = tl.load(at + RANK + 2 * pair, mask=is_pair, other=0.0).to(tl.float32)
            other = tl.load(at + RANK + 2 * pair + 1, mask=is_pair, other=0.0).to(tl.float32)
            row = latents_ptr + (slot // PAGE) * block_stride + (slot % PAGE) * WIDTH
            kind = latents_ptr.dtype.element_ty
            tl.store(row + c, (latent * scale * weight).to(kind), mask=c < RANK)
            tl.store(row + RANK + 2 * pair, (one * cos - other * sin).to(kind), mask=is_pair)
            tl.store(row + RANK + 2 * pair + 1, (other * cos + one * sin).to(kind), mask=is_pair)


def latent_rope_kv(
    queries: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    rotated: torch.Tensor,
    latents: torch.Tensor,
    eps: float = 1e-6,
    *,
    pdl: bool = False,
) -> None:
    """Writes the rotated parts of the queries, and what the cache holds of the tokens.

    Arguments:
        queries: [num_tokens, num_heads, plain + rotary]; only the first dimension may have gaps.
        tokens: [num_tokens, rank + rotary], a latent and a part that is to be rotated; may be columns of wider rows.
        positions, slots: [num_tokens] integers; a slot is block * block_size + offset, or -1 for a token that is not written.
        cos, sin: float32 [max_positions, rotary / 2].
        norm: weight [rank] of the norm of latents.
        rotated: [num_tokens, num_heads, rotary], columns of the contiguous [num_tokens, num_heads, rank + rotary].
        latents: [num_blocks, block_size, rank + rotary]; the last two dimensions are contiguous.
        eps: of the norm.
    """
    num_tokens, num_heads, rotary = rotated.shape
    rank = norm.shape[0]
    config = lookup("latent_rope_kv", "*", queries.device)
    launch(
        latent_rope_kv_kernel,
        (num_tokens, triton.cdiv(num_heads, config["HEADS"]) + 1),
        (
            queries,
            tokens,
            positions,
            slots,
            cos,
            sin,
            norm,
            rotated,
            latents,
            queries.stride(0),
            tokens.stride(0),
            latents.stride(0),
            eps,
        ),
        NUM_HEADS=num_heads,
        PLAIN=queries.shape[2] - rotary,
        RANK=rank,
        RANK_BLOCK=triton.next_power_of_2(rank),
        ROTARY=rotary,
        HALF_BLOCK=triton.next_power_of_2(rotary // 2),
        PAGE=latents.shape[1],
        **dependent(pdl, queries.device),
        **config,
    )
