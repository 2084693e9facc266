"""How the key tiles of a decode step are divided among a fixed number of programs (reference: `reference.plan_decode`).

The tiles of all sequences and key-value heads form one line: head by head, within a head sequence by sequence. Each program
gets `quota` consecutive tiles of it, whatever the lengths are, so that all end at about the same time. This is stream-K (Osama et
al., arXiv:2301.03598). The plan is made on the device, once per step, and used by every layer of the same window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch


@triton.jit
def first_tile(seq_len, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The first tile of keys that any of the last Q_LEN tokens may see."""
    tile = seq_len * 0
    if WINDOW > 0:
        tile = tl.maximum(seq_len - Q_LEN - WINDOW + 1, 0) // TILE
    return tile


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def plan_decode_kernel(
    seq_lens_ptr,
    ends_ptr,
    quota_ptr,
    num_rows,
    num_programs,
    NUM_KV: tl.constexpr,
    Q_LEN: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    mask = row < num_rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr + row, mask=mask, other=0)
    tiles = (seq_len + TILE - 1) // TILE - first_tile(seq_len, Q_LEN, WINDOW, TILE)
    tl.store(ends_ptr + 1 + row, tl.cumsum(tiles, 0), mask=mask)
    tl.store(ends_ptr + row, 0, mask=row == 0)
    total = tl.sum(tiles, 0) * NUM_KV
    tl.store(quota_ptr, tl.maximum((total + num_programs - 1) // num_programs, MIN_TILES))


def plan_decode(
    seq_lens: torch.Tensor,
    ends: torch.Tensor,
    quota: torch.Tensor,
    num_programs: int,
    num_kv_heads: int,
    *,
    tile: int,
    q_len: int = 1,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """ends[i + 1]: tiles of one head in rows 0 to i; quota: tiles per program.

    seq_lens: int32 [num_rows] with the new tokens, 0 for padding. ends: int32 [num_rows + 1]; quota: int32 [1]. window:
    how many keys a token sees, itself included; 0: all. num_programs, tile: those of `attn_decode.division`.
    """
    num_rows = seq_lens.shape[0]
    launch(
        plan_decode_kernel,
        (1,),
        (seq_lens, ends, quota, num_rows, num_programs),
        NUM_KV=num_kv_heads,
        Q_LEN=q_len,
        WINDOW=window,
        TILE=tile,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        **dependent(pdl, seq_lens.device),
        **lookup("plan_decode", "*", seq_lens.device),
    )
