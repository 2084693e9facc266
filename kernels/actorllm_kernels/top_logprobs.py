"""Log-probabilities of the chosen token and of the most likely ones, and the rank of the former (reference:
`reference.top_logprobs`).

From logits as the model gave them. The most likely ids are found by the maxima of the tiles. The largest of the maxima names the
tile, of which 256 logits are read, and so on for each id that is wanted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from actorllm_kernels.configs import lookup
from actorllm_kernels.launcher import launch
from actorllm_kernels.sample_topk_topp import FilterScratch


@triton.jit
def top_logprobs_kernel(
    logits_ptr,
    highest_ptr,
    mass_ptr,
    tokens_ptr,
    ids_ptr,
    logprobs_ptr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NUM_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + i * VOCAB
    out = i * (NUM_TOP + 1)
    tile = tl.arange(0, BLOCK)
    lane = tl.arange(0, 256)
    highest = tl.load(highest_ptr + i * NUM_TILES + tile, mask=tile < NUM_TILES, other=-float("inf"))
    highest = tl.where(highest != highest, -float("inf"), highest)
    mass = tl.load(mass_ptr + i * NUM_TILES + tile, mask=tile < NUM_TILES, other=0.0)
    top = tl.max(highest, 0)
    base = tl.where(top > -float("inf"), top, 0.0)
    log_mass = tl.log(tl.sum(mass * tl.exp(highest - base), 0))

    token = tl.load(tokens_ptr + i)
    tl.store(ids_ptr + out, token)
    tl.store(logprobs_ptr + out, (tl.load(row_ptr + token).to(tl.float32) - base) - log_mass)
    # Ids come in the order of their logits, and those of equal logits in their own: what comes after the last one is left.
    last = top
    last_id = token * 0 - 1
    for j in range(NUM_TOP):
        best_tile = tl.argmax(highest, 0)
        id = best_tile * 256 + lane
        x = tl.load(row_ptr + id, mask=id < VOCAB, other=-float("inf")).to(tl.float32)
        is_left = ((x < last) | ((x == last) & (id > last_id))) & (id < VOCAB)
        x = tl.where(is_left, x, -float("inf"))
        found = tl.max(x, 0)
        found_id = tl.min(tl.where(is_left & (x == found), id, 2147483647), 0)
        found_id = tl.minimum(found_id, VOCAB - 1)
        tl.store(ids_ptr + out + 1 + j, found_id)
        tl.store(logprobs_ptr + out + 1 + j, (found - base) - log_mass)
        rest = tl.max(tl.where((x < found) | (id > found_id), x, -float("inf")), 0)
        highest = tl.where(tile == best_tile, rest, highest)
        last = found
        last_id = found_id


@triton.jit
def rank_kernel(
    logits_ptr, highest_ptr, tokens_ptr, ranks_ptr, VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    chosen = tl.load(logits_ptr + i * VOCAB + tl.load(tokens_ptr + i)).to(tl.float32)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    highest = tl.load(highest_ptr + i * NUM_TILES + tile, mask=tile < NUM_TILES, other=-float("inf"))
    id = tile[:, None] * 256 + tl.arange(0, 256)[None, :]
    mask = (highest >= chosen)[:, None] & (id < VOCAB)
    x = tl.load(logits_ptr + i * VOCAB + id, mask=mask, other=-float("inf")).to(tl.float32)
    count = tl.sum(tl.sum((mask & (x >= chosen)).to(tl.int32), 1), 0)
    if count > 0:
        tl.atomic_add(ranks_ptr + i, count, sem="relaxed")


def top_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    scratch: FilterScratch,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    """After `tile_maxima` of these logits with has_mass; they must not have been changed since.

    logits: [num_rows, vocab_size]; tokens: int32 [num_rows], the chosen ones. Outputs: ids int32 and logprobs float32
    [num_rows, 1 + num_top], the chosen token first; ranks int32 [num_rows]: how many ids are at least as likely.
    """
    launch_top_logprobs(logits, tokens, scratch, ids, logprobs)
    ranks.zero_()
    launch_ranks(logits, tokens, scratch, ranks)


def launch_top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, scratch: FilterScratch, ids: torch.Tensor, logprobs: torch.Tensor
) -> None:
    """All but the ranks."""
    num_rows, vocab_size = logits.shape
    num_tiles = scratch.highest.shape[1]
    launch(
        top_logprobs_kernel,
        (num_rows,),
        (logits, scratch.highest, scratch.mass, tokens, ids, logprobs),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        NUM_TOP=ids.shape[1] - 1,
        BLOCK=triton.next_power_of_2(num_tiles),
        **lookup("top_logprobs", "*", logits.device),
    )


def launch_ranks(logits: torch.Tensor, tokens: torch.Tensor, scratch: FilterScratch, ranks: torch.Tensor) -> None:
    """Adds the ranks to what is there."""
    num_rows, vocab_size = logits.shape
    num_tiles = scratch.highest.shape[1]
    config = lookup("ranks", "*", logits.device)
    launch(
        rank_kernel,
        (num_rows, triton.cdiv(num_tiles, config["TILES"])),
        (logits, scratch.highest, tokens, ranks),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        **config,
    )
