"""Attention of the last 1 to 4 tokens of every sequence over the paged cache (reference: `reference.attention`).

A fixed number of programs share the key tiles of all sequences and heads as `plan_decode` has divided them. Every length is
read from the device, so that one graph serves all lengths. A program walks its tiles. What it finds of a sequence may be the whole
of it, which it writes to the output. Or it is a part, which it writes to `partials` together with the logsumexp of its scores.
`attn_combine` merges the parts. A program has at most two: one that began before it, one that goes on after it.

All heads of a group and all new tokens of a sequence are rows of one tile of queries. So keys and values are read once. A tile of
keys lies within one block of the cache, so that it is one contiguous piece of memory. Its block id is one number, and nothing is
masked but the scores. That needs a cache that is finite everywhere, since what lies behind the end of
a sequence is read and multiplied by 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup, num_multiprocessors
from actorllm_kernels.plan_decode import first_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""The score of what is not seen; finite, so that a row that sees nothing makes no NaN."""

MAX_Q_LEN = 4
"""Tokens per sequence; more are the business of `attn_prefill`."""


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores / SOFTCAP), for scores in units of log2(e); 0: the scores."""
    if SOFTCAP > 0:
        # tanh(z) = 1 - 2 / (exp(2 * z) + 1), and exp2 of a score in units of log2(e) is exp of the score
        scores = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0))
    return scores


@triton.jit(do_not_specialize=["num_rows"])
def attn_decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    rows_ptr,
    table_ptr,
    seq_lens_ptr,
    ends_ptr,
    quota_ptr,
    weight_sinks_ptr,
    out_ptr,
    partials_ptr,
    partial_lse_ptr,
    num_rows,
    table_stride,
    key_stride,
    value_stride,
    scale_log2,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    PER_PAGE: tl.constexpr = PAGE // TILE
    NUM_Q: tl.constexpr = NUM_KV * GROUP
    program = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = tl.arange(0, ROWS)
    all_ends = tl.load(ends_ptr + 1 + entry, mask=entry < num_rows, other=2147483647)
    tiles_per_head = tl.load(ends_ptr + num_rows)
    quota = tl.load(quota_ptr)
    low = program * quota
    high = tl.minimum(low + quota, tiles_per_head * NUM_KV)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_BLOCK)
    n = tl.arange(0, TILE)
    token = m // GROUP  # among the new ones of the sequence
    is_row = m < Q_LEN * GROUP
    in_head = d < DIM

    # Offsets within a tile are the same everywhere, and 32 bits wide: what changes is a scalar.
    q_inside = (token * NUM_Q + m % GROUP)[:, None] * DIM + d[None, :]
    k_inside = n[None, :] * DIM + d[:, None]
    v_inside = n[:, None] * DIM + d[None, :]

    at = low
    while at < high:
        head = at // tiles_per_head
        place = at - head * tiles_per_head
        i = tl.sum((all_ends <= place).to(tl.int32), 0)  # the first sequence that ends behind this place
        begin = tl.load(ends_ptr + i)
        end = tl.load(ends_ptr + i + 1)
        count = tl.minimum(end - place, high - at)
        seq_len = tl.load(seq_lens_ptr + i)
        first = place - begin + first_tile(seq_len, Q_LEN, WINDOW, TILE)
        table = table_ptr + tl.load(rows_ptr + i).to(tl.int64) * table_stride

        q_first = (i * (Q_LEN * NUM_Q) + head * GROUP).to(tl.int64) * DIM
        q = tl.load(q_ptr + q_first + q_inside, mask=is_row[:, None] & in_head[None, :], other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        position = seq_len - Q_LEN + token
        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
        for t in range(first, first + count):
            block = tl.load(table + t // PER_PAGE).to(tl.int64)
            first_key = head * (PAGE * DIM) + (t % PER_PAGE) * (TILE * DIM)
            k_at = (keys_ptr + block * key_stride + first_key) + k_inside
            v_at = (values_ptr + block * value_stride + first_key) + v_inside
            if DIM == DIM_BLOCK:
                k = tl.load(k_at)  # [DIM_BLOCK, TILE]
                v = tl.load(v_at)  # [TILE, DIM_BLOCK]
            else:
                k = tl.load(k_at, mask=in_head[:, None], other=0.0)
                v = tl.load(v_at, mask=in_head[None, :], other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = capped(tl.dot(q, k, input_precision="ieee") * scale_log2, SOFTCAP)
            key = t * TILE + n
            is_seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, LOWEST)
            higher = tl.maximum(highest, tl.max(scores, 1))
            # a row that has seen nothing yet has `higher` at LOWEST, and counts what it may not see: hence the second where
            p = tl.where(is_seen, tl.exp2(scores - higher[:, None]), 0.0)
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            highest = higher

        is_whole = (place == begin) & (count == end - begin)
        if is_whole:
            if HAS_SINKS:
                sink = (
                    tl.load(weight_sinks_ptr + head * GROUP + m % GROUP, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
                )
                higher = tl.maximum(highest, sink)
                shrink = tl.exp2(highest - higher)
                total = total * shrink + tl.exp2(sink - higher)
                acc = acc * shrink[:, None]
            y = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(
                out_ptr + q_first + q_inside, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & in_head[None, :]
            )
        else:
            part = program * 2 + tl.where(at == low, 0, 1)
            y = acc / tl.where(total > 0, total, 1.0)[:, None]
            p_at = part * (Q_LEN * GROUP) + m
            tl.store(partials_ptr + p_at[:, None] * DIM + d[None, :], y, mask=is_row[:, None] & in_head[None, :])
            lse = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), LOWEST)
            tl.store(partial_lse_ptr + p_at, lse, mask=is_row)
        at += count


class Division(NamedTuple):
    """How the work is shared out; `plan_decode` and `attn_decode` must be given the same."""

    programs: int
    """As many as are meant to be on the GPU at once."""
    tile: int
    """Keys of a tile."""


def division(device: torch.device, head_dim: int, q_rows: int = 16) -> Division:
    """What the table wants for this GPU. q_rows: query heads per key-value head, times the new tokens of a sequence."""
    config = lookup("attn_decode", shape_class(head_dim, q_rows), device)
    return Division(num_multiprocessors(device) * config["PER_SM"], config["TILE"])


def per_sm(device: torch.device, head_dim: int, q_rows: int) -> int:
    """How many programs of a multiprocessor are meant to be there at once; arguments as of `division`."""
    return lookup("attn_decode", shape_class(head_dim, q_rows), device)["PER_SM"]


def shape_class(head_dim: int, q_rows: int) -> str:
    """Of the configuration table: the block of the head size, and "-wide" for more than 16 rows of queries."""
    return f"d{triton.next_power_of_2(head_dim)}" + ("-wide" if q_rows > 16 else "")


def attn_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    ends: torch.Tensor,
    quota: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    programs: int,
    tile: int,
    pdl: bool = False,
) -> None:
    """Writes out where a sequence was not divided, else partials; `attn_combine` must follow.

    q, out: [num_rows * q_len, num_heads, head_dim], q_len from 1 to 4 the same for all rows. keys, values: [num_blocks,
    num_kv_heads, block_size, head_dim] (see `qknorm_rope_kv`). table: int32 [num_slots, max_blocks], of which row i of the
    batch uses row rows[i]. seq_lens: int32 [num_rows] with the new tokens, 0 for padding. ends, quota: from `plan_decode`
    with the same window, programs and tile (see `division`). partials: float32 [2 * programs, q_len * num_heads /
    num_kv_heads, head_dim]; partial_lse: without the last dimension. sinks: [num_heads] logits that take a share of the
    softmax and add nothing.
    """
    num_rows = seq_lens.shape[0]
    num_tokens, num_heads, dim = q.shape
    _, num_kv_heads, page, _ = keys.shape
    q_len, group = num_tokens // num_rows, num_heads // num_kv_heads
    if q_len * num_rows != num_tokens or not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(
            f"{num_tokens} tokens of {num_rows} rows: every row must have the same number, from 1 to {MAX_Q_LEN}"
        )
    config = dict(lookup("attn_decode", shape_class(dim, q_len * group), q.device))
    del config["PER_SM"]
    config["TILE"] = tile
    if page % tile:
        raise ValueError(f"block_size={page} is no multiple of the tile of {tile} keys")
    attn_decode_kernel[(programs,)](
        q,
        keys,
        values,
        rows,
        table,
        seq_lens,
        ends,
        quota,
        q if sinks is None else sinks,
        out,
        partials,
        partial_lse,
        num_rows,
        table.stride(0),
        keys.stride(0),
        values.stride(0),
        scale * 1.4426950408889634,
        NUM_KV=num_kv_heads,
        GROUP=group,
        Q_LEN=q_len,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        PAGE=page,
        BLOCK_M=max(16, triton.next_power_of_2(q_len * group)),
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        WINDOW=window,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        UPCAST=q.device.type == "cpu",
        **dependent(pdl, q.device),
        **config,
    )
