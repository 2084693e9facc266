"""Where the cutoff of top_p lies, for rows that have no other filter (reference: `reference.kept`).

Nearly all tiles of such a row may hold the cutoff, and one program would walk all of them for every pivot that it tries. So all
multiprocessors look at the row twice. `weigh` finds how much of the mass lies in each of NUM_BINS ranges of y = (logit -
largest) / temperature. The ranges are BIN wide, but for the last, which has the rest. The program of each range of tiles adds its
masses as integers, whose sum does not depend on their order. `collect` then knows the range in which the cutoff lies. Of each
group of tiles it leaves the keys in that range, and the mass above it. The masses of `weigh` serve for nothing but that
choice. The program that decides (`sample_topk_topp.cutoff_kernel`) reads a few thousand keys instead of the vocabulary. It checks
that the cutoff is among them. Where a group has more keys than there is room for, it walks the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

NUM_BINS = 256
BIN = tl.constexpr(1.0 / 16)
"""Of y: the last bin has what is less than exp(-15.9) as likely as the most likely id."""
GROUP = 8
"""Tiles of 256 ids of one program."""
CAPACITY = 64
"""Keys that a group has room for."""
FIXED_POINT = tl.constexpr(4294967296.0)
DOUBT = tl.constexpr(1.0e-5)
"""Of the mass, by which the choice of the ranges may be wrong: they are summed by matrix units."""


@dataclass(frozen=True, slots=True)
class NucleusScratch:
    """What the launches leave to each other."""

    bins: torch.Tensor
    """int64 [num_rows, NUM_BINS]: masses in units of 2**-32; 0 between steps"""
    sums: torch.Tensor
    """float32 [2, num_rows, num_groups]: the mass above the ranges in question, and all of it"""
    counts: torch.Tensor
    """int32 [num_rows, num_groups]: ids in these ranges"""
    keys: torch.Tensor
    """int32 [num_rows, num_groups, CAPACITY]: their keys, as far as there is room"""

    @classmethod
    def empty(cls, num_rows: int, num_tiles: int, device: torch.device) -> NucleusScratch:
        num_groups = triton.cdiv(num_tiles, GROUP)
        return cls(
            torch.zeros(num_rows, NUM_BINS, dtype=torch.int64, device=device),
            torch.empty(2, num_rows, num_groups, device=device),
            torch.empty(num_rows, num_groups, dtype=torch.int32, device=device),
            torch.empty(num_rows, num_groups, CAPACITY, dtype=torch.int32, device=device),
        )

    def first(self, num_rows: int) -> NucleusScratch:
        """The same for fewer rows."""
        return NucleusScratch(
            self.bins[:num_rows], self.sums[:, :num_rows], self.counts[:num_rows], self.keys[:num_rows]
        )


@triton.jit
def key_of(logits, top, temperature):
    """y, and its key: the smaller the key, the larger y. The same bits in every kernel, or a pivot would not be found."""
    y = tl.div_rn(logits - top, tl.zeros_like(logits) + temperature)
    y = tl.where(logits == -float("inf"), -float("inf"), y)
    return y, (0.0 - y).to(tl.int32, bitcast=True)


@triton.jit
def is_nucleus(temperature, top_k, top_p, min_p, VOCAB: tl.constexpr):
    """Whether a row has top_p alone."""
    return (temperature > 0.0) & (top_p < 1.0) & ((top_k <= 0) | (top_k >= VOCAB)) & (min_p <= 0.0)


@triton.jit
def row_top(highest_ptr, i, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row that is a number."""
    tile = tl.arange(0, BLOCK)
    highest = tl.load(highest_ptr + i * NUM_TILES + tile, mask=tile < NUM_TILES, other=-float("inf"))
    top = tl.max(tl.where(highest != highest, -float("inf"), highest), 0)
    return tl.where(top > -float("inf"), top, 0.0)


@triton.jit
def bin_of(y, LAST: tl.constexpr):
    """Which range, and the mass. What is no number goes to the last, with none."""
    is_number = y <= 0.0
    distance = tl.where(is_number, (0.0 - y) / BIN, LAST)
    return tl.minimum(distance, LAST).to(tl.int32), tl.where(is_number, tl.exp(y), 0.0)


@triton.jit
def weigh_kernel(
    logits_ptr,
    highest_ptr,
    bins_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    IDS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + i).to(tl.int64)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        if is_nucleus(temperature, top_k, tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot), VOCAB):
            top = row_top(highest_ptr, i, NUM_TILES, BLOCK)
            digit = tl.arange(0, 16)
            sums = tl.zeros([16, 16], tl.float32)
            for t in range(IDS // 64):
                id = tl.program_id(1) * IDS + t * 64 + tl.arange(0, 64)
                x = tl.load(logits_ptr + i * VOCAB + id, mask=id < VOCAB, other=-float("inf"))
                y, _key = key_of(x.to(tl.float32), top, temperature)
                bin, mass = bin_of(y, 255.0)
                # A product adds the masses up: of each id by the upper digit of its bin, with a one at the lower digit.
                upper = tl.where((bin >> 4)[None, :] == digit[:, None], mass[None, :], 0.0)
                lower = ((bin & 15)[:, None] == digit[None, :]).to(tl.float32)
                sums = tl.dot(upper, lower, sums, input_precision="tf32x3")
            fixed = (sums * FIXED_POINT).to(tl.int64)
            at = digit[:, None] * 16 + digit[None, :]
            tl.atomic_add(bins_ptr + i * 256 + at, fixed, mask=fixed > 0, sem="relaxed")


@triton.jit
def collect_kernel(
    logits_ptr,
    highest_ptr,
    bins_ptr,
    sums_ptr,
    counts_ptr,
    keys_ptr,
    sums_stride,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + i).to(tl.int64)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        if is_nucleus(temperature, top_k, top_p, tl.load(min_p_ptr + slot), VOCAB):
            top = row_top(highest_ptr, i, NUM_TILES, BLOCK)
            reached = tl.cumsum(tl.load(bins_ptr + i * 256 + tl.arange(0, 256)), 0)
            total = tl.max(reached, 0).to(tl.float32)
            wanted = top_p * total
            first = tl.sum((reached.to(tl.float32) < wanted - DOUBT * total).to(tl.int32), 0)
            last = tl.sum((reached.to(tl.float32) < wanted + DOUBT * total).to(tl.int32), 0)

            id = tl.program_id(1) * (GROUP * 256) + tl.arange(0, GROUP * 256)
            x = tl.load(logits_ptr + i * VOCAB + id, mask=id < VOCAB, other=-float("inf"))
            y, key = key_of(x.to(tl.float32), top, temperature)
            bin, mass = bin_of(y, 255.0)
            is_in = (bin >= first) & (bin <= last) & (y > -float("inf")) & (y <= 0.0)
            place = tl.cumsum(is_in.to(tl.int32), 0) - 1
            at = i * NUM_GROUPS + tl.program_id(1)
            tl.store(keys_ptr + at * CAPACITY + place, key, mask=is_in & (place < CAPACITY))
            tl.store(counts_ptr + at, tl.sum(is_in.to(tl.int32), 0))
            tl.store(sums_ptr + at, tl.sum(tl.where(bin < first, mass, 0.0), 0))
            tl.store(sums_ptr + sums_stride + at, tl.sum(mass, 0))
