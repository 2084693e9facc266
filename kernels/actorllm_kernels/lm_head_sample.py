"""The last norm, the product with the LM head, and the draw of every tile of the vocabulary. No logit is written
(reference: `reference.fused_linear`, then `reference.sample`).

A program computes the 256 logits of one tile for all rows, in float32, and leaves of them what `sample_pick` wants. For rows
that want nothing but temperature; what filters, changes or reports logits goes through `sample_topk_topp`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch
from actorllm_kernels.sample_pick import Offers, SamplingState, tile_offer
from actorllm_kernels.skinny_gemm import columns_ahead, prefetch_rows

MAX_BLOCK_M = 32
"""Rows of one program, whose sums must fit into registers."""
DRAWN = tl.constexpr(16)
"""Rows that a program draws for at once. The noise of more takes so many registers that one program alone would fit on a
multiprocessor: nothing would read while it draws."""


@triton.jit
def offer_rows(
    logits,
    m,
    is_m,
    tile,
    rows_ptr,
    temperature_ptr,
    seed_ptr,
    sample_index_ptr,
    token_index_ptr,
    highest_ptr,
    weights_out_ptr,
    id_ptr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """What this tile offers to some rows. logits: [256, rows]."""
    slot = tl.load(rows_ptr + m, mask=is_m, other=-1).to(tl.int64)
    is_live = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=is_live, other=0.0)
    seed = tl.load(seed_ptr + slot, mask=is_live, other=0)
    sample_index = tl.load(sample_index_ptr + slot, mask=is_live, other=0)
    token_index = tl.load(token_index_ptr + slot, mask=is_live, other=0)
    highest, weight, id = tile_offer(logits, m * 0 + tile, temperature, seed, sample_index, token_index, VOCAB)
    at = m * NUM_TILES + tile
    tl.store(highest_ptr + at, highest, mask=is_m)
    tl.store(weights_out_ptr + at, weight, mask=is_m)
    tl.store(id_ptr + at, id, mask=is_m)


@triton.jit(do_not_specialize=["num_rows"])
def lm_head_sample_kernel(
    x_ptr,
    weight_ptr,
    weight_norm_ptr,
    rows_ptr,
    temperature_ptr,
    seed_ptr,
    sample_index_ptr,
    token_index_ptr,
    highest_ptr,
    weights_out_ptr,
    id_ptr,
    num_rows,
    eps,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    UPCAST: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    tile = tl.program_id(1)  # programs that share a tile are neighbours: the second finds it in the cache
    n = tile * 256 + tl.arange(0, 256)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    is_n = n < VOCAB
    is_m = m < num_rows
    if AHEAD:
        prefetch_rows(weight_ptr, n, is_n, 0, min(AHEAD, K), K, AHEAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    row = tl.where(is_n, n, 0).to(tl.int64)[:, None] * K
    acc = tl.zeros([256, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + k
        x_mask = is_m[None, :] if EVEN_K else is_m[None, :] & (column < K)[:, None]
        x = tl.load(x_ptr + m[None, :] * K + column[:, None], mask=x_mask, other=0.0)  # [BLOCK_K, BLOCK_M]
        if EVEN_K:
            w = tl.load(weight_ptr + row + column[None, :])  # [256, BLOCK_K]
        else:
            w = tl.load(weight_ptr + row + column[None, :], mask=(column < K)[None, :], other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            norm = tl.load(weight_norm_ptr + column, mask=column < K, other=0.0).to(tl.float32)
            x = (wide * norm[:, None]).to(x.dtype)
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if HAS_NORM:
        acc *= (1.0 / tl.sqrt(squares / K + eps))[None, :]
    logits = tl.where(is_n[:, None], acc, -float("inf"))
    if BLOCK_M <= DRAWN:
        offer_rows(
            logits, m, is_m, tile, rows_ptr, temperature_ptr, seed_ptr, sample_index_ptr, token_index_ptr,
            highest_ptr, weights_out_ptr, id_ptr, VOCAB, NUM_TILES,
        )  # fmt: skip
    else:
        tl.static_assert(BLOCK_M == 2 * DRAWN)
        first, second = tl.split(tl.permute(tl.reshape(logits, (256, 2, DRAWN)), (0, 2, 1)))
        for half in tl.range(0, 2, loop_unroll_factor=1):
            some = tl.program_id(0) * BLOCK_M + half * DRAWN + tl.arange(0, DRAWN)
            offer_rows(
                tl.where(half == 0, first, second), some, some < num_rows, tile,
                rows_ptr, temperature_ptr, seed_ptr, sample_index_ptr, token_index_ptr,
                highest_ptr, weights_out_ptr, id_ptr, VOCAB, NUM_TILES,
            )  # fmt: skip


def lm_head_sample(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    offers: Offers,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    pdl: bool = False,
) -> None:
    """Fills the offers; `sample_pick` must follow.

    x: [num_rows, hidden_size], at most 64 rows; weight: [vocab_size, hidden_size]; rows: int32 [num_rows] slots, or -1.
    norm: weight of the norm in front, [hidden_size].
    """
    num_rows, size = x.shape
    if num_rows > 64:
        raise ValueError(f"{num_rows} rows are too many for lm_head_sample, which takes 64")
    vocab_size = weight.shape[0]
    num_tiles = offers.id.shape[1]
    waiting = dependent(pdl, x.device)
    config = dict(lookup("lm_head_sample", "few" if num_rows <= 16 else "many", x.device))
    prefetches = bool(config.pop("PREFETCH", 1)) and waiting["PDL"] and x.element_size() == 2
    block_m = max(16, min(MAX_BLOCK_M, triton.next_power_of_2(num_rows)))
    launch(
        lm_head_sample_kernel,
        (triton.cdiv(num_rows, block_m), num_tiles),
        (
            x,
            weight,
            x if norm is None else norm,
            rows,
            state.temperature,
            state.seed,
            state.sample_index,
            state.token_index,
            offers.highest,
            offers.weight,
            offers.id,
            num_rows,
            eps,
        ),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        K=size,
        BLOCK_M=block_m,
        HAS_NORM=norm is not None,
        UPCAST=x.device.type == "cpu",
        AHEAD=columns_ahead(num_tiles, 256, x.device) if prefetches else 0,
        **waiting,
        **config,
    )
