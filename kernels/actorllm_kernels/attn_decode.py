"""Attention of the last 1 to 4 tokens of every sequence over the paged cache (reference: `reference.attention`).

A fixed number of programs share the key tiles of all sequences and heads as `plan_decode` has divided them. Every length is
read from the device, so that one graph serves all lengths. A program walks its tiles. What it finds of a sequence may be the whole
of it, which it writes to the output. Or it is a part, which it writes to `partials` together with the logsumexp of its scores.
A program has at most two: one that began before it, one that goes on after it. The program whose part of a sequence and head is
the last to arrive merges all of them, in their order. So the result does not depend on which one that is.

All heads of a group and all new tokens of a sequence are rows of one tile of queries. So keys and values are read once. A tile of
keys lies within one block of the cache, so that it is one contiguous piece of memory. Its block id is one number, and nothing is
masked but the scores. That needs a cache that is finite everywhere, since what lies behind the end of
a sequence is read and multiplied by 0.

Where a sequence has one new token, it may also be given what the product for query, key and value left (`rope`). Then each program
norms and rotates the queries that it needs, as `qknorm_rope_kv` does. The one that has the last tile of a sequence does so with the
new key. Before it reads the tile, it writes the new key and value to the cache. That saves a launch per layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup, num_multiprocessors
from actorllm_kernels.float8 import FLOAT8_SCALE, widened
from actorllm_kernels.launcher import launch
from actorllm_kernels.plan_decode import first_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""The score of what is not seen; finite, so that a row that sees nothing makes no NaN."""

MAX_Q_LEN = 4
"""Tokens per sequence; more are the business of `attn_prefill`."""


MERGED_AT_ONCE = 2048
"""Numbers of parts, so that they fit into registers beside what is merged."""
MAX_TURNED = 4096
"""Numbers of the heads that a program norms and rotates, so that they fit into registers."""


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores / SOFTCAP), for scores in units of log2(e); 0: the scores."""
    if SOFTCAP > 0:
        # tanh(z) = 1 - 2 / (exp(2 * z) + 1), and exp2 of a score in units of log2(e) is exp of the score
        scores = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0))
    return scores


@triton.jit
def merge_parts(
    out_ptr,
    partials_ptr,
    partial_lse_ptr,
    weight_sinks_ptr,
    head,
    q_first,
    begin,
    end,
    quota,
    NUM_Q: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """What several programs found of one sequence and head, weighted by their logsumexps. begin, end: its tiles, of all heads.

    Parts are not read from the cache of this multiprocessor, which may have what was there before.
    """
    d = tl.arange(0, DIM_BLOCK)
    in_head = d < DIM
    first = begin // quota
    last = (end - 1) // quota
    for row in range(0, Q_LEN * GROUP, QUERIES):  # few at a time, so that they fit into registers
        r = row + tl.arange(0, QUERIES)
        is_row = r < Q_LEN * GROUP
        if HAS_SINKS:
            sink = tl.load(weight_sinks_ptr + head * GROUP + r % GROUP, mask=is_row, other=0.0)
            highest = sink.to(tl.float32) * LOG2_E
            total = tl.full([QUERIES], 1.0, tl.float32)
        else:
            highest = tl.full([QUERIES], LOWEST, tl.float32)
            total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
        for start in range(first, last + 1, PARTS):
            program = start + tl.arange(0, PARTS)
            is_part = (program <= last)[:, None] & is_row[None, :]
            # a program's second part is the one that it did not begin with
            part = program * 2 + ((program == first) & (begin > program * quota)).to(tl.int32)
            at = (part * (Q_LEN * GROUP))[:, None] + r[None, :]  # [PARTS, QUERIES]
            lse = tl.load(partial_lse_ptr + at, mask=is_part, other=LOWEST, cache_modifier=".cg")
            y = tl.load(
                partials_ptr + at[:, :, None] * DIM + d[None, None, :],
                mask=is_part[:, :, None] & in_head[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            higher = tl.maximum(highest, tl.max(lse, 0))
            shrink = tl.exp2(highest - higher)
            weight = tl.where(lse > LOWEST, tl.exp2(lse - higher[None, :]), 0.0)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * y, 0)
            total = total * shrink + tl.sum(weight, 0)
            highest = higher
        y = acc / tl.where(total > 0, total, 1.0)[:, None]
        inside = ((r // GROUP) * NUM_Q + r % GROUP)[:, None] * DIM + d[None, :]
        tl.store(out_ptr + q_first + inside, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & in_head[None, :])


@triton.jit
def turned_heads(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    weight_q_ptr,
    weight_k_ptr,
    row,
    head,
    position,
    eps,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The heads of one key-value head in a row of qkv, float32 [BLOCK_M, DIM_BLOCK]: its queries, then the key, then the value.

    Queries and key are normed and rotated as `qknorm_rope_kv` does it; rows behind the value are 0.
    """
    HALF: tl.constexpr = DIM // 2
    NUM_Q: tl.constexpr = NUM_KV * GROUP
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_BLOCK)
    is_first = d < HALF
    pair = tl.where(is_first, d, d - HALF)
    other = tl.where(is_first, d + HALF, d - HALF)
    in_head = d < DIM
    column = tl.where(m < GROUP, head * GROUP + m, tl.where(m == GROUP, NUM_Q + head, NUM_Q + NUM_KV + head))
    mask = (m < GROUP + 2)[:, None] & in_head[None, :]
    at = row.to(tl.int64) * ((NUM_Q + 2 * NUM_KV) * DIM) + column[:, None] * DIM
    x = tl.load(qkv_ptr + at + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(qkv_ptr + at + other[None, :], mask=mask, other=0.0).to(tl.float32)  # the other one of its pair
    is_query = (m < GROUP)[:, None]
    is_value = (m == GROUP + 1)[:, None]
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)
        qx = tl.load(weight_q_ptr + d, mask=in_head, other=0.0).to(tl.float32)
        kx = tl.load(weight_k_ptr + d, mask=in_head, other=0.0).to(tl.float32)
        qy = tl.load(weight_q_ptr + other, mask=in_head, other=0.0).to(tl.float32)
        ky = tl.load(weight_k_ptr + other, mask=in_head, other=0.0).to(tl.float32)
        x = tl.where(is_value, x, x * scale[:, None] * tl.where(is_query, qx[None, :], kx[None, :]))
        y = tl.where(is_value, y, y * scale[:, None] * tl.where(is_query, qy[None, :], ky[None, :]))
    angle = position.to(tl.int64) * HALF + pair
    cos = tl.load(cos_ptr + angle, mask=in_head, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=in_head, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    return tl.where(is_value, x, x * cos[None, :] + y * sin[None, :])


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
    arrivals_ptr,
    weight_sinks_ptr,
    out_ptr,
    partials_ptr,
    partial_lse_ptr,
    cos_ptr,
    sin_ptr,
    weight_q_ptr,
    weight_k_ptr,
    num_rows,
    table_stride,
    key_stride,
    value_stride,
    scale_log2,
    eps,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SKIPPED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """IS_FLOAT8: keys and values are codes, whose numbers are too small by 256; scale_log2 has it of keys. IS_PACKED: q_ptr is what
    the product for query, key and value left.
    """
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

    # Padding rows have no tiles. Their output is 0.
    width = tl.arange(0, 1024)
    for i in range(program, num_rows, tl.num_programs(0)):
        if tl.load(ends_ptr + i) == tl.load(ends_ptr + i + 1):
            for start in range(0, Q_LEN * NUM_Q * DIM, 1024):
                column = start + width
                zero = tl.zeros([1024], tl.float32).to(out_ptr.dtype.element_ty)
                is_there = column < Q_LEN * NUM_Q * DIM
                tl.store(out_ptr + i * (Q_LEN * NUM_Q * DIM) + column, zero, mask=is_there)

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
        if IS_PACKED:
            heads = turned_heads(
                q_ptr, cos_ptr, sin_ptr, weight_q_ptr, weight_k_ptr, i, head, seq_len - 1, eps,
                NUM_KV, GROUP, DIM, DIM_BLOCK, BLOCK_M, HAS_NORM,
            )  # fmt: skip
            q = tl.where(is_row[:, None], heads, 0.0).to(q_ptr.dtype.element_ty)
            if place + count == end:  # this program reads the tile of the new key
                key = tl.sum(tl.where((m == GROUP)[:, None], heads, 0.0), 0).to(q_ptr.dtype.element_ty)
                value = tl.sum(tl.where((m == GROUP + 1)[:, None], heads, 0.0), 0).to(q_ptr.dtype.element_ty)
                block = tl.load(table + (seq_len - 1) // PAGE).to(tl.int64)
                new_at = head * (PAGE * DIM) + ((seq_len - 1) % PAGE) * DIM + d
                tl.store(keys_ptr + block * key_stride + new_at, key, mask=in_head)
                tl.store(values_ptr + block * value_stride + new_at, value, mask=in_head)
                tl.debug_barrier()  # all threads have stored before one of them reads
        else:
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
            if IS_FLOAT8:
                k = widened(k, True, q.dtype)
                v = widened(v, True, q.dtype)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = capped(tl.dot(q, k, input_precision="ieee") * scale_log2, SOFTCAP)
            key = t * TILE + n
            is_seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
            if SKIPPED > 0:
                is_seen = is_seen & (key[None, :] >= SKIPPED)
            scores = tl.where(is_seen, scores, LOWEST)
            higher = tl.maximum(highest, tl.max(scores, 1))
            # a row that has seen nothing yet has `higher` at LOWEST, and counts what it may not see: hence the second where
            p = tl.where(is_seen, tl.exp2(scores - higher[:, None]), 0.0)
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            highest = higher

        if IS_FLOAT8:
            acc = acc * 256.0
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
            tl.debug_barrier()  # all threads have stored before one of them counts
            here = arrivals_ptr + i * NUM_KV + head
            of_begin = head * tiles_per_head + begin
            of_end = head * tiles_per_head + end
            arrived = tl.atomic_add(here, 1, sem="acq_rel")
            if arrived == (of_end - 1) // quota - of_begin // quota:
                tl.store(here, 0)  # as the next launch must find it
                merge_parts(
                    out_ptr, partials_ptr, partial_lse_ptr, weight_sinks_ptr, head, q_first, of_begin, of_end, quota,
                    NUM_Q, GROUP, Q_LEN, DIM, DIM_BLOCK, QUERIES, PARTS, HAS_SINKS,
                )  # fmt: skip
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


def takes_packed(head_dim: int, group: int, cache: torch.dtype) -> bool:
    """Whether `attn_decode` can be given what the product for query, key and value left, for heads, groups and a cache like these.

    It is a matter of registers: what widens keys and values of 8 bits needs them.
    """
    rows = block_rows(group)
    return cache != torch.uint8 and group + 2 <= rows and rows * triton.next_power_of_2(head_dim) <= MAX_TURNED


def block_rows(q_rows: int) -> int:
    """Rows of the tile of queries."""
    size: int = triton.next_power_of_2(q_rows)
    return max(16, size)


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
    arrivals: torch.Tensor,
    out: torch.Tensor,
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    skipped: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    programs: int,
    tile: int,
    pdl: bool = False,
) -> None:
    """Writes out; rows of padding are 0.

    q, out: [num_rows * q_len, num_heads, head_dim], q_len from 1 to 4 the same for all rows. keys, values: [num_blocks,
    num_kv_heads, block_size, head_dim] (see `qknorm_rope_kv`), in the type of q, or uint8:
    codes of float8_e4m3fn. table: int32 [num_slots, max_blocks], of which row i of the
    batch uses row rows[i]. seq_lens: int32 [num_rows] with the new tokens, 0 for padding. ends, quota: from `plan_decode`
    with the same window, programs and tile (see `division`). arrivals: int32 [num_rows * num_kv_heads], 0 between launches.
    partials: float32 [2 * programs, q_len * num_heads /
    num_kv_heads, head_dim]; partial_lse: without the last dimension. sinks: [num_heads] logits that take a share of the
    softmax and add nothing. skipped: keys at the beginning of every sequence that no token sees, fewer than a tile has.

    rope: float32 [max_positions, head_dim / 2], cosines and sines. With them q is [num_rows, (num_heads + 2 * num_kv_heads) *
    head_dim]: query, key and value of one new token per row, as the product left them. The new keys and values are written to
    the cache. norms, eps: of query and key heads, as of `qknorm_rope_kv`. Only where `takes_packed`.
    """
    num_rows = seq_lens.shape[0]
    num_tokens, num_heads, dim = out.shape
    _, num_kv_heads, page, _ = keys.shape
    q_len, group = num_tokens // num_rows, num_heads // num_kv_heads
    if q_len * num_rows != num_tokens or not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(
            f"{num_tokens} tokens of {num_rows} rows: every row must have the same number, from 1 to {MAX_Q_LEN}"
        )
    if rope is not None and not (q_len == 1 and takes_packed(dim, group, keys.dtype)):
        raise ValueError(
            f"{q_len} new tokens, groups of {group} heads of size {dim}, a cache of {keys.dtype}: attention takes no packed rows"
        )
    config = dict(lookup("attn_decode", shape_class(dim, q_len * group), q.device))
    del config["PER_SM"]
    config["TILE"] = tile
    if page % tile:
        raise ValueError(f"block_size={page} is no multiple of the tile of {tile} keys")
    is_float8 = keys.dtype == torch.uint8
    queries, dim_block = min(4, triton.next_power_of_2(q_len * group)), triton.next_power_of_2(dim)
    launch(
        attn_decode_kernel,
        (programs,),
        (
            q,
            keys,
            values,
            rows,
            table,
            seq_lens,
            ends,
            quota,
            arrivals,
            q if sinks is None else sinks,
            out,
            partials,
            partial_lse,
            *(rope if rope is not None else (partials, partials)),
            *(norms if norms is not None else (q, q)),
            num_rows,
            table.stride(0),
            keys.stride(0),
            values.stride(0),
            scale * 1.4426950408889634 * (FLOAT8_SCALE if is_float8 else 1.0),
            eps,
        ),
        NUM_KV=num_kv_heads,
        GROUP=group,
        Q_LEN=q_len,
        DIM=dim,
        DIM_BLOCK=dim_block,
        PAGE=page,
        BLOCK_M=block_rows(q_len * group),
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        QUERIES=queries,
        PARTS=max(1, min(8, MERGED_AT_ONCE // (queries * dim_block))),
        WINDOW=window,
        SKIPPED=skipped,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        IS_FLOAT8=is_float8,
        IS_PACKED=rope is not None,
        HAS_NORM=norms is not None,
        UPCAST=q.device.type == "cpu",
        **dependent(pdl, q.device),
        **config,
    )
