"""The last stage of sampling: of what every tile of 256 ids offers, the best (reference: `reference.sample`).

A tile offers the id that it would choose and the largest of its logits (docs/sampling.md). It also offers its logsumexp
relative to that logit, with the noise of the tile added. `lm_head_sample` and `sample_topk_topp` make the offers. Here the tile
with the best score wins. The token goes to the batch's outputs and to the state table, and the next step may begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from actorllm_kernels.configs import dependent, lookup
from actorllm_kernels.launcher import launch
from actorllm_kernels.philox import ID_DOMAIN, TILE_DOMAIN, four_in_a_row, gumbel, noise_words

TILE = 256
"""Ids per tile, part of the definition."""


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Columns of the state table that sampling reads and advances, [num_slots] each."""

    temperature: torch.Tensor
    """float32; 0 is greedy"""
    seed: torch.Tensor
    """int64: the bits of the unsigned seed"""
    sample_index: torch.Tensor
    """int32"""
    token_index: torch.Tensor
    """int32: tokens of output so far; grows by one with every token picked"""
    last_token: torch.Tensor
    """int32"""


@dataclass(frozen=True, slots=True)
class Offers:
    """What every tile of every row offers, [num_rows, num_tiles] each."""

    highest: torch.Tensor
    """float32: the largest logit, NaN if one of them is NaN or positive infinity"""
    weight: torch.Tensor
    """float32: log of the sum of exp((logit - highest) / temperature), plus the noise of the tile"""
    id: torch.Tensor
    """int32"""

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> Offers:
        shape = (num_rows, -(-vocab_size // TILE))
        floats = torch.empty(2, *shape, device=device)
        return cls(floats[0], floats[1], torch.empty(shape, dtype=torch.int32, device=device))


@triton.jit
def tile_offer(logits, tile, temperature, seed, sample_index, token_index, VOCAB: tl.constexpr):
    """What some tiles offer, each to its row: highest, weight, id, [columns] each.

    logits: float32 [256, columns], -inf where an id may not be chosen. The others: [columns]; tile: the number of it.
    """
    is_bad = (logits != logits) | (logits == float("inf"))
    logits = tl.where(is_bad, -float("inf"), logits)
    highest = tl.max(logits, 0)
    is_greedy = temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, temperature)
    base = tl.where(highest > -float("inf"), highest, 0.0)
    y = (logits - base[None, :]) / divisor[None, :]

    group = tile[None, :] * 64 + tl.arange(0, 64)[:, None]
    a, b, c, d = noise_words(seed[None, :], sample_index[None, :], token_index[None, :], group, ID_DOMAIN)
    noise = gumbel(four_in_a_row(a, b, c, d))  # [256, rows]
    z = tl.where(is_greedy[None, :], y, y + noise)
    best = tl.argmax(z, 0)

    a, b, c, d = noise_words(seed, sample_index, token_index, tile >> 2, TILE_DOMAIN)
    lane = tile & 3
    word = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
    weight = tl.log(tl.sum(tl.exp(y), 0)) + gumbel(word)
    weight = tl.where(is_greedy, 0.0, weight)
    highest = tl.where(tl.max(is_bad.to(tl.int32), 0) > 0, float("nan"), highest)
    return highest, weight, tl.minimum(tile * 256 + best, VOCAB - 1)


@triton.jit
def sample_pick_kernel(
    highest_ptr,
    weight_ptr,
    id_ptr,
    rows_ptr,
    temperature_ptr,
    token_index_ptr,
    last_token_ptr,
    tokens_ptr,
    is_finite_ptr,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    mask = tile < NUM_TILES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(rows_ptr + i).to(tl.int64)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot)
        highest = tl.load(highest_ptr + i * NUM_TILES + tile, mask=mask, other=-float("inf"))
        weight = tl.load(weight_ptr + i * NUM_TILES + tile, mask=mask, other=0.0)
        is_bad = tl.max((highest != highest).to(tl.int32), 0)
        highest = tl.where(highest != highest, -float("inf"), highest)
        top = tl.max(highest, 0)
        is_finite = (is_bad == 0) & (top > -float("inf"))
        divisor = tl.where(temperature == 0.0, 1.0, temperature)
        score = (highest - tl.where(top > -float("inf"), top, 0.0)) / divisor + weight
        score = tl.where(mask & (highest > -float("inf")), score, -float("inf"))
        best = tl.argmax(score, 0)
        token = tl.load(id_ptr + i * NUM_TILES + tl.minimum(best, NUM_TILES - 1))
        tl.store(tokens_ptr + i, token)
        tl.store(is_finite_ptr + i, is_finite.to(tl.int32))
        tl.store(last_token_ptr + slot, token)
        tl.store(token_index_ptr + slot, tl.load(token_index_ptr + slot) + 1)
    else:
        tl.store(tokens_ptr + i, 0)
        tl.store(is_finite_ptr + i, 1)


def sample_pick(
    offers: Offers,
    rows: torch.Tensor,
    state: SamplingState,
    tokens: torch.Tensor,
    is_finite: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """tokens: int32 [num_rows], 0 for padding; is_finite: int32 [num_rows], 0 if a logit is NaN or positive infinity, or
    none is left.

    rows: int32 [num_rows] slots, or -1. last_token and token_index of the state are advanced.
    """
    num_rows, num_tiles = offers.id.shape
    launch(
        sample_pick_kernel,
        (num_rows,),
        (
            offers.highest,
            offers.weight,
            offers.id,
            rows,
            state.temperature,
            state.token_index,
            state.last_token,
            tokens,
            is_finite,
        ),
        NUM_TILES=num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        **dependent(pdl, tokens.device),
        **lookup("sample_pick", "*", tokens.device),
    )
