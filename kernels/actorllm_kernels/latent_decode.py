"""Attention of the last token of every sequence over the latents of a paged cache (reference: `reference.latent_attention`).

What the cache holds of a token is one row for all heads: its latent, and a part that is rotated (DeepSeek-V2, arXiv:2405.04434).
Queries come absorbed: the product that makes keys of latents is made on the query. So a score is the product of a query with a row,
and what is attended to is a sum of latents. Rows are read once for a group of query heads, as keys and as values.

Work is divided as in `attn_decode`, with a group of query heads in the place of a key-value head. A program walks tiles of rows. It
writes what it finds of a sequence to the output, or a part of it to `partials`. The last part of a sequence and group to arrive
merges all of them, in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.attn_decode import LOWEST, MERGED_AT_ONCE, Division, merge_parts
from actorllm_kernels.configs import Config, dependent, lookup, num_multiprocessors
from actorllm_kernels.launcher import launch

MAX_RANK = 512
"""Numbers of a latent."""
MAX_ROTARY = 64


@triton.jit
def attend_latents(
    acc,
    total,
    highest,
    q,
    q_rotary,
    position,
    first,
    last,
    latents_ptr,
    table_ptr,
    block_stride,
    scale_log2,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SKIPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """The sums of a softmax carried on over the tiles [first, last). position: of each row of queries."""
    PER_PAGE: tl.constexpr = PAGE // TILE
    WIDTH: tl.constexpr = RANK + ROTARY
    n = tl.arange(0, TILE)
    c = tl.arange(0, RANK_BLOCK)
    r = tl.arange(0, ROTARY_BLOCK)
    inside = n[:, None] * WIDTH + c[None, :]
    rotary_inside = n[None, :] * WIDTH + RANK + r[:, None]
    for t in range(first, last):
        block = tl.load(table_ptr + t // PER_PAGE).to(tl.int64)
        tile_ptr = latents_ptr + block * block_stride + (t % PER_PAGE) * (TILE * WIDTH)
        if RANK == RANK_BLOCK:
            latent = tl.load(tile_ptr + inside)  # [TILE, RANK_BLOCK]
        else:
            latent = tl.load(tile_ptr + inside, mask=(c < RANK)[None, :], other=0.0)
        if ROTARY == ROTARY_BLOCK:
            rotary = tl.load(tile_ptr + rotary_inside)  # [ROTARY_BLOCK, TILE]
        else:
            rotary = tl.load(tile_ptr + rotary_inside, mask=(r < ROTARY)[:, None], other=0.0)
        if UPCAST:
            latent = latent.to(tl.float32)
            rotary = rotary.to(tl.float32)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rotary, rotary, scores, input_precision="ieee") * scale_log2
        if IS_MASKED:
            is_seen = (t * TILE + n)[None, :] <= position[:, None]
            if SKIPPED > 0:
                is_seen = is_seen & ((t * TILE + n)[None, :] >= SKIPPED)
            scores = tl.where(is_seen, scores, LOWEST)
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(
            scores - higher[:, None]
        )  # of a row that has seen no key, here or before, it would be 1: only where some are skipped
        if IS_MASKED and SKIPPED > 0:
            p = tl.where(is_seen, p, 0.0)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        highest = higher
    return acc, total, highest


@triton.jit(do_not_specialize=["num_rows"])
def latent_decode_kernel(
    q_ptr,
    latents_ptr,
    rows_ptr,
    table_ptr,
    seq_lens_ptr,
    ends_ptr,
    quota_ptr,
    arrivals_ptr,
    out_ptr,
    partials_ptr,
    partial_lse_ptr,
    num_rows,
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
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_Q: tl.constexpr = NUM_GROUPS * GROUP
    WIDTH: tl.constexpr = RANK + ROTARY
    program = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = tl.arange(0, ROWS)
    all_ends = tl.load(ends_ptr + 1 + entry, mask=entry < num_rows, other=2147483647)
    tiles_per_group = tl.load(ends_ptr + num_rows)
    quota = tl.load(quota_ptr)
    low = program * quota
    high = tl.minimum(low + quota, tiles_per_group * NUM_GROUPS)

    # Padding rows have no tiles. Their output is 0.
    width = tl.arange(0, 1024)
    for i in range(program, num_rows, tl.num_programs(0)):
        if tl.load(ends_ptr + i) == tl.load(ends_ptr + i + 1):
            for start in range(0, NUM_Q * RANK, 1024):
                column = start + width
                zero = tl.zeros([1024], tl.float32).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + i * (NUM_Q * RANK) + column, zero, mask=column < NUM_Q * RANK)

    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, RANK_BLOCK)
    r = tl.arange(0, ROTARY_BLOCK)
    is_row = m < GROUP
    is_rank = c < RANK

    at = low
    while at < high:
        group = at // tiles_per_group
        place = at - group * tiles_per_group
        i = tl.sum((all_ends <= place).to(tl.int32), 0)  # the first sequence that ends behind this place
        begin = tl.load(ends_ptr + i)
        end = tl.load(ends_ptr + i + 1)
        count = tl.minimum(end - place, high - at)
        seq_len = tl.load(seq_lens_ptr + i)
        table = table_ptr + tl.load(rows_ptr + i).to(tl.int64) * table_stride

        first_head = (i * NUM_Q + group * GROUP).to(tl.int64)
        q_at = q_ptr + first_head * WIDTH + m[:, None] * WIDTH
        q = tl.load(q_at + c[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
        q_rotary = tl.load(q_at + RANK + r[None, :], mask=is_row[:, None] & (r < ROTARY)[None, :], other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
            q_rotary = q_rotary.to(tl.float32)
        position = m * 0 + seq_len - 1
        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
        acc, total, highest = attend_latents(
            acc, total, highest, q, q_rotary, position, place - begin, place - begin + count, latents_ptr, table, block_stride,
            scale_log2, RANK, RANK_BLOCK, ROTARY, ROTARY_BLOCK, PAGE, TILE, SKIPPED, UPCAST, True,
        )  # fmt: skip

        y = acc / tl.where(total > 0, total, 1.0)[:, None]
        q_first = first_head * RANK
        inside = m[:, None] * RANK + c[None, :]
        mask = is_row[:, None] & is_rank[None, :]
        is_whole = (place == begin) & (count == end - begin)
        if is_whole:
            tl.store(out_ptr + q_first + inside, y.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            part = program * 2 + tl.where(at == low, 0, 1)
            tl.store(partials_ptr + part * (GROUP * RANK) + inside, y, mask=mask)
            lse = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), LOWEST)
            tl.store(partial_lse_ptr + part * GROUP + m, lse, mask=is_row)
            tl.debug_barrier()  # all threads have stored before one of them counts
            here = arrivals_ptr + i * NUM_GROUPS + group
            of_begin = group * tiles_per_group + begin
            of_end = group * tiles_per_group + end
            arrived = tl.atomic_add(here, 1, sem="acq_rel")
            if arrived == (of_end - 1) // quota - of_begin // quota:
                tl.store(here, 0)  # as the next launch must find it
                merge_parts(
                    out_ptr, partials_ptr, partial_lse_ptr, partial_lse_ptr, group, q_first, of_begin, of_end, quota,
                    NUM_Q, GROUP, 1, RANK, RANK_BLOCK, QUERIES, PARTS, False,
                )  # fmt: skip
        at += count


class Heads(NamedTuple):
    """How query heads are put together."""

    group: int
    """Of so many heads, a program reads a row of the cache once."""
    num_groups: int
    division: Division
    """Of the tiles of a group; `plan_decode` and `latent_decode` must be given the same."""


def _config(num_heads: int, device: torch.device) -> Config:
    return lookup("latent_decode", "narrow" if num_heads <= 16 else "wide", device)


def heads_together(num_heads: int, device: torch.device) -> Heads:
    """What the table wants for this GPU."""
    config = _config(num_heads, device)
    group = largest_divisor(num_heads, config["BLOCK_M"])
    return Heads(group, num_heads // group, Division(num_multiprocessors(device) * config["PER_SM"], config["TILE"]))


def per_sm(num_heads: int, device: torch.device) -> int:
    """How many programs of a multiprocessor are meant to be there at once."""
    return _config(num_heads, device)["PER_SM"]


def largest_divisor(number: int, most: int) -> int:
    """Of a number, of those that are no larger than `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def blocks_of(rank: int, rotary: int) -> dict[str, int]:
    """Constants of the kernels that read rows of so many numbers. Raises ValueError."""
    if rank > MAX_RANK or rotary > MAX_ROTARY:
        raise ValueError(f"rows of {rank} + {rotary} numbers are too wide: {MAX_RANK} + {MAX_ROTARY} is the most")
    blocks = (max(16, triton.next_power_of_2(size)) for size in (rank, rotary))
    return {"RANK": rank, "ROTARY": rotary, **dict(zip(("RANK_BLOCK", "ROTARY_BLOCK"), blocks, strict=True))}


def latent_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    ends: torch.Tensor,
    quota: torch.Tensor,
    arrivals: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    scale: float,
    *,
    skipped: int = 0,
    programs: int,
    tile: int,
    pdl: bool = False,
) -> None:
    """Writes out; rows of padding are 0.

    Arguments:
        q: [num_rows, num_heads, width], contiguous: what the product for keys makes of a query, then its rotated part.
        latents: [num_blocks, block_size, width] in the type of q; the last two dimensions are contiguous. Finite.
        rows, table, seq_lens: as of `attn_decode`.
        ends, quota: from `plan_decode` with the same programs and tile, and as many heads as there are groups.
        arrivals: int32 [num_rows * num_groups], 0 between launches.
        out: [num_rows, num_heads, rank].
        partials, partial_lse: float32 [2 * programs, group, rank], and without the last dimension.
        scale: of scores.
        skipped: rows at the beginning of every sequence that no token sees, fewer than a tile has.
        programs, tile: `heads_together(num_heads).division`.

    Raises ValueError for a tile that no block is a multiple of, and for rows that are too wide.
    """
    num_rows, num_heads, width = q.shape
    page, rank, group = latents.shape[1], out.shape[2], partials.shape[1]
    config = dict(_config(num_heads, q.device))
    del config["PER_SM"]
    config["TILE"] = tile
    if page % tile:
        raise ValueError(f"block_size={page} is no multiple of the tile of {tile} rows")
    blocks = blocks_of(rank, width - rank)
    queries = min(4, triton.next_power_of_2(group))
    launch(
        latent_decode_kernel,
        (programs,),
        (
            q,
            latents,
            rows,
            table,
            seq_lens,
            ends,
            quota,
            arrivals,
            out,
            partials,
            partial_lse,
            num_rows,
            table.stride(0),
            latents.stride(0),
            scale * 1.4426950408889634,
        ),
        NUM_GROUPS=num_heads // group,
        GROUP=group,
        PAGE=page,
        SKIPPED=skipped,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        QUERIES=queries,
        PARTS=max(1, min(8, MERGED_AT_ONCE // (queries * blocks["RANK_BLOCK"]))),
        UPCAST=q.device.type == "cpu",
        **blocks,
        **dependent(pdl, q.device),
        **config,
    )
