"""Attention of chunks of prompts over the paged cache (reference: `reference.attention`).

The chunk's own keys and values are in the cache already. A program takes some tokens of one sequence with all query heads of one
key-value head. That is 128 rows at best, so that the matrix units for large tiles are used. It walks the keys from the first that
any of its tokens may see. Most tiles of keys are seen by all of them. Only the tiles at the diagonal, and those at the
left edge of a window, are masked. As in `attn_decode`, a tile lies within one block of the cache, and the cache is finite.

There is a second build for sm_90, which is experimental: no GPU has run it. Nothing launches it unless a caller asks for it
by the layout of the queries. Queries, keys and values are fetched by tensor descriptors, and
by warps that do nothing else. The compiler wants all three so, four warps and one loop, in which every tile is masked.
Descriptors take memory that `triton.set_allocator` provides.

The host cuts the step into tiles of queries (`query_tiles`), once for all layers: prefill is not in a graph.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from actorllm_kernels.attn_decode import LOG2_E, LOWEST, capped
from actorllm_kernels.configs import Config, lookup
from actorllm_kernels.float8 import FLOAT8_SCALE, widened
from actorllm_kernels.launcher import launch


@triton.jit
def attend(
    acc,
    total,
    highest,
    q,
    position,
    first,
    last,
    keys,
    values,
    table_ptr,
    head,
    key_stride,
    value_stride,
    scale_log2,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SKIPPED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    UPCAST: tl.constexpr,
    BY_TMA: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """The sums of a softmax carried on over the tiles [first, last) of one head.

    keys, values: pointers to the cache, or descriptors of it as rows of DIM.
    """
    PER_PAGE: tl.constexpr = PAGE // TILE
    n = tl.arange(0, TILE)
    d = tl.arange(0, DIM_BLOCK)
    in_head = d < DIM
    k_inside = n[None, :] * DIM + d[:, None]
    v_inside = n[:, None] * DIM + d[None, :]
    for t in tl.range(first, last, warp_specialize=BY_TMA):
        if BY_TMA:
            block = tl.load(table_ptr + t // PER_PAGE)
            row = head * PAGE + (t % PER_PAGE) * TILE
            k = keys.load([block * (key_stride // DIM) + row, 0]).T
            v = values.load([block * (value_stride // DIM) + row, 0])
        else:
            block = tl.load(table_ptr + t // PER_PAGE).to(tl.int64)
            first_key = head * (PAGE * DIM) + (t % PER_PAGE) * (TILE * DIM)
            k_at = (keys + block * key_stride + first_key) + k_inside
            v_at = (values + block * value_stride + first_key) + v_inside
            if DIM == DIM_BLOCK:
                k = tl.load(k_at)
                v = tl.load(v_at)
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
        if IS_MASKED:
            key = t * TILE + n
            is_seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
            if SKIPPED > 0:
                is_seen = is_seen & (key[None, :] >= SKIPPED)
            scores = tl.where(is_seen, scores, LOWEST)
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        if IS_MASKED:
            p = tl.where(is_seen, p, 0.0)  # of a row that has seen nothing, `higher` is LOWEST too
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        highest = higher
    return acc, total, highest


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def attn_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    rows_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    tiles_ptr,
    weight_sinks_ptr,
    out_ptr,
    num_tokens,
    num_blocks,
    table_stride,
    key_stride,
    value_stride,
    scale_log2,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
    SKIPPED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    UPCAST: tl.constexpr,
    BY_TMA: tl.constexpr,
):
    """IS_FLOAT8: as in `attn_decode`."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    NUM_Q: tl.constexpr = NUM_KV * GROUP
    head = tl.program_id(1)
    i = tl.load(tiles_ptr + 2 * tl.program_id(0))
    start = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    begin = tl.load(starts_ptr + i)
    count = tl.load(starts_ptr + i + 1) - begin
    history = tl.load(seq_lens_ptr + i) - count

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_BLOCK)
    token = start + m // GROUP  # of the chunk
    is_row = (m < TOKENS * GROUP) & (token < count)
    in_head = d < DIM
    q_first = ((begin + start) * NUM_Q + head * GROUP).to(tl.int64) * DIM
    q_inside = ((m // GROUP) * NUM_Q + m % GROUP)[:, None] * DIM + d[None, :]
    if BY_TMA:
        # Queries come head by head, so that a tile is one piece; rows behind the chunk are read and not stored.
        queries = tl.make_tensor_descriptor(q_ptr, [num_tokens * NUM_Q, DIM], [DIM, 1], [BLOCK_M, DIM])
        keys = tl.make_tensor_descriptor(keys_ptr, [num_blocks * (key_stride // DIM), DIM], [DIM, 1], [TILE, DIM])
        values = tl.make_tensor_descriptor(values_ptr, [num_blocks * (value_stride // DIM), DIM], [DIM, 1], [TILE, DIM])
        q = queries.load([(head * num_tokens + begin + start) * GROUP, 0])
    else:
        keys = keys_ptr
        values = values_ptr
        q = tl.load(q_ptr + q_first + q_inside, mask=is_row[:, None] & in_head[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # Tiles of keys: from `left` on masked by the window or by what is skipped, from `inner` on not at all, from `diagonal` on by
    # the order.
    end = tl.minimum(start + TOKENS, count)
    last = (history + end + TILE - 1) // TILE
    diagonal = (history + start + 1) // TILE
    left = start * 0
    inner = left
    if WINDOW > 0:
        left = tl.maximum(history + start - WINDOW + 1, 0) // TILE
        inner = (tl.maximum(history + end - WINDOW, 0) + TILE - 1) // TILE
        diagonal = tl.maximum(diagonal, left)
        inner = tl.minimum(tl.maximum(inner, left), diagonal)
    if SKIPPED > 0:
        inner = tl.maximum(inner, tl.minimum(1, diagonal))  # the keys that are skipped are in the first tile

    table = table_ptr + tl.load(rows_ptr + i).to(tl.int64) * table_stride
    position = history + token
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
    if BY_TMA:  # one loop: the compiler does not take two
        acc, total, highest = attend(
            acc, total, highest, q, position, left, last, keys, values, table, head, key_stride, value_stride, scale_log2,
            DIM, DIM_BLOCK, PAGE, TILE, WINDOW, SKIPPED, SOFTCAP, IS_FLOAT8, UPCAST, True, True,
        )  # fmt: skip
    else:
        if WINDOW + SKIPPED > 0:
            acc, total, highest = attend(
                acc, total, highest, q, position, left, inner, keys, values, table, head, key_stride, value_stride,
                scale_log2, DIM, DIM_BLOCK, PAGE, TILE, WINDOW, SKIPPED, SOFTCAP, IS_FLOAT8, UPCAST, False, True,
            )  # fmt: skip
        acc, total, highest = attend(
            acc, total, highest, q, position, inner, diagonal, keys, values, table, head, key_stride, value_stride,
            scale_log2, DIM, DIM_BLOCK, PAGE, TILE, WINDOW, SKIPPED, SOFTCAP, IS_FLOAT8, UPCAST, False, False,
        )  # fmt: skip
        acc, total, highest = attend(
            acc, total, highest, q, position, diagonal, last, keys, values, table, head, key_stride, value_stride,
            scale_log2, DIM, DIM_BLOCK, PAGE, TILE, WINDOW, SKIPPED, SOFTCAP, IS_FLOAT8, UPCAST, False, True,
        )  # fmt: skip
    if IS_FLOAT8:
        acc = acc * 256.0
    if HAS_SINKS:
        sink = tl.load(weight_sinks_ptr + head * GROUP + m % GROUP, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    y = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + q_first + q_inside, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & in_head[None, :])


def _config(head_dim: int, device: torch.device, by_tma: bool = False, is_float8: bool = False) -> Config:
    dim = triton.next_power_of_2(head_dim)
    variant = "-tma" if by_tma else "-float8" if is_float8 and dim == 256 else ""  # numbers of codes take registers
    return lookup("attn_prefill", f"d{dim}{variant}", device)


def tokens_per_tile(group: int, head_dim: int, device: torch.device, by_tma: bool = False) -> int:
    """How many tokens one program takes, for `query_tiles`; group: query heads per key-value head.

    As many for floats of 8 bits.
    """
    return _config(head_dim, device, by_tma)["BLOCK_M"] // group


def query_tiles(counts: NDArray[np.int32], seq_lens: NDArray[np.int32], tokens: int) -> NDArray[np.int32]:
    """The step cut into pieces of so many tokens: (sequence, first token of its chunk), int32 [num_tiles, 2].

    counts: tokens of every chunk; seq_lens: with the chunk. What reads most keys comes first, so that no long piece is left
    over at the end.
    """
    num_tiles = -(-counts // tokens)
    row = np.repeat(np.arange(len(counts)), num_tiles)
    start = (np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tokens
    order = np.argsort(-((seq_lens - counts)[row] + start), kind="stable")
    tiles: NDArray[np.int32] = np.stack((row, start), 1)[order].astype(np.int32)
    return tiles


def attn_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    skipped: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    block_m: int | None = None,
    tile: int | None = None,
) -> None:
    """Writes out.

    q, out: [num_tokens, num_heads, head_dim], of which tokens [starts[i], starts[i + 1]) are the last of sequence i.

    starts: int32 [num_rows + 1]; tiles: `query_tiles` for `tokens_per_tile`, on the device. The rest as in `attn_decode`;
    block_m and tile are for tests.

    If q comes head by head, [num_kv_heads, num_tokens, group, head_dim], the build by descriptors runs: sm_90 only, head
    sizes 64 and 128; keys and values must be views of blocks whose size is a multiple of head_dim.
    """
    num_tokens, num_heads, dim = out.shape
    _, num_kv_heads, page, _ = keys.shape
    by_tma, is_float8 = q.dim() == 4, keys.dtype == torch.uint8
    if by_tma and is_float8:
        raise ValueError("the build by descriptors reads no codes: keys and values must be in the type of q")
    config = dict(_config(dim, q.device, by_tma, is_float8))
    if block_m is not None:
        config["BLOCK_M"] = block_m
    if tile is not None:
        config["TILE"] = tile
    if page % config["TILE"]:
        raise ValueError(f"block_size={page} is no multiple of the tile of {config['TILE']} keys")
    launch(
        attn_prefill_kernel,
        (tiles.shape[0], num_kv_heads),
        (
            q,
            keys,
            values,
            rows,
            table,
            seq_lens,
            starts,
            tiles,
            q if sinks is None else sinks,
            out,
            num_tokens,
            keys.shape[0],
            table.stride(0),
            keys.stride(0),
            values.stride(0),
            scale * 1.4426950408889634 * (FLOAT8_SCALE if is_float8 else 1.0),
        ),
        NUM_KV=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        PAGE=page,
        WINDOW=window,
        SKIPPED=skipped,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        IS_FLOAT8=is_float8,
        UPCAST=q.device.type == "cpu",
        BY_TMA=by_tma,
        **config,
    )
