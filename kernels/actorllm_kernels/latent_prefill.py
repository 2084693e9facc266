"""Attention of chunks of prompts over the latents of a paged cache (reference: `reference.latent_attention`).

Queries are absorbed, as in `latent_decode`, so that nothing is made of the latents but sums, whatever the length. A program takes
some tokens of one sequence with a group of query heads. It walks the rows of the cache up to the last of these tokens. Only the
tiles at the diagonal are masked. The host cuts the step into tiles of queries (`attn_prefill.query_tiles`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from actorllm_kernels.attn_decode import LOWEST
from actorllm_kernels.configs import lookup
from actorllm_kernels.latent_decode import attend_latents, blocks_of, largest_divisor
from actorllm_kernels.launcher import launch


@triton.jit
def latent_prefill_kernel(
    q_ptr,
    latents_ptr,
    rows_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    tiles_ptr,
    out_ptr,
    table_stride,
    block_stride,
    scale_log2,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SKIPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    NUM_Q: tl.constexpr = NUM_GROUPS * GROUP
    WIDTH: tl.constexpr = RANK + ROTARY
    group = tl.program_id(1)
    i = tl.load(tiles_ptr + 2 * tl.program_id(0))
    start = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    begin = tl.load(starts_ptr + i)
    count = tl.load(starts_ptr + i + 1) - begin
    history = tl.load(seq_lens_ptr + i) - count

    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, RANK_BLOCK)
    r = tl.arange(0, ROTARY_BLOCK)
    token = start + m // GROUP  # of the chunk
    is_row = (m < TOKENS * GROUP) & (token < count)
    first_head = ((begin + start) * NUM_Q + group * GROUP).to(tl.int64)
    head = m if NUM_GROUPS == 1 else (m // GROUP) * NUM_Q + m % GROUP
    mask = is_row[:, None] & (c < RANK)[None, :]
    q_at = q_ptr + first_head * WIDTH + head[:, None] * WIDTH
    q = tl.load(q_at + c[None, :], mask=mask, other=0.0)
    q_rotary = tl.load(q_at + RANK + r[None, :], mask=is_row[:, None] & (r < ROTARY)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
        q_rotary = q_rotary.to(tl.float32)

    last = (history + tl.minimum(start + TOKENS, count) + TILE - 1) // TILE
    diagonal = (history + start + 1) // TILE
    table = table_ptr + tl.load(rows_ptr + i).to(tl.int64) * table_stride
    position = history + token
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
    if SKIPPED > 0:  # one loop, in which every tile is masked: a third one would not fit into registers
        acc, total, highest = attend_latents(
            acc, total, highest, q, q_rotary, position, 0, last, latents_ptr, table, block_stride, scale_log2, RANK, RANK_BLOCK,
            ROTARY, ROTARY_BLOCK, PAGE, TILE, SKIPPED, UPCAST, True,
        )  # fmt: skip
    else:
        acc, total, highest = attend_latents(
            acc, total, highest, q, q_rotary, position, 0, diagonal, latents_ptr, table, block_stride, scale_log2, RANK,
            RANK_BLOCK, ROTARY, ROTARY_BLOCK, PAGE, TILE, SKIPPED, UPCAST, False,
        )  # fmt: skip
        acc, total, highest = attend_latents(
            acc, total, highest, q, q_rotary, position, diagonal, last, latents_ptr, table, block_stride, scale_log2, RANK,
            RANK_BLOCK, ROTARY, ROTARY_BLOCK, PAGE, TILE, SKIPPED, UPCAST, True,
        )  # fmt: skip
    y = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + first_head * RANK + head[:, None] * RANK + c[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def heads_of_prompts(num_heads: int, device: torch.device) -> tuple[int, int]:
    """Query heads of a program, and tokens of it, which is what `query_tiles` must be given."""
    most = lookup("latent_prefill", "*", device)["BLOCK_M"]
    group = largest_divisor(num_heads, most)
    return group, most // group


def latent_prefill(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    skipped: int = 0,
    block_m: int | None = None,
    tile: int | None = None,
) -> None:
    """Writes out.

    Arguments:
        q: [num_tokens, num_heads, width], of which tokens [starts[i], starts[i + 1]) are the last of sequence i.
        latents, rows, table, seq_lens, scale, skipped: as of `latent_decode`.
        starts: int32 [num_rows + 1].
        tiles: `query_tiles` for the tokens of `heads_of_prompts`, on the device.
        out: [num_tokens, num_heads, rank].
        block_m, tile: for tests.

    Raises ValueError for a tile that no block is a multiple of, and for rows that are too wide.
    """
    num_heads, width = q.shape[1:]
    page, rank = latents.shape[1], out.shape[2]
    config = dict(lookup("latent_prefill", "*", q.device))
    if block_m is not None:
        config["BLOCK_M"] = block_m
    if tile is not None:
        config["TILE"] = tile
    if page % config["TILE"]:
        raise ValueError(f"block_size={page} is no multiple of the tile of {config['TILE']} rows")
    group = largest_divisor(num_heads, config["BLOCK_M"])
    launch(
        latent_prefill_kernel,
        (tiles.shape[0], num_heads // group),
        (
            q,
            latents,
            rows,
            table,
            seq_lens,
            starts,
            tiles,
            out,
            table.stride(0),
            latents.stride(0),
            scale * 1.4426950408889634,
        ),
        NUM_GROUPS=num_heads // group,
        GROUP=group,
        PAGE=page,
        SKIPPED=skipped,
        UPCAST=q.device.type == "cpu",
        **blocks_of(rank, width - rank),
        **config,
    )
