"""Sampling from logits that were written: bit masks, min_p, top_k and top_p, then the draw of every tile
(reference: `reference.kept` and `reference.sample`).

For steps whose logits are changed, filtered or reported, and for batches too large for `lm_head_sample`. Nothing is sorted but
the maxima of the tiles. A filter keeps what is at least a pivot. The pivot is searched by bisection of the bits of the logits.
They are those of y in docs/sampling.md: y <= 0, so that the bits of -y are in the order of the values. Only tiles whose
largest logit is above a bound of the pivot are looked at. Where these are few, as with top_k, they are read once, and pivots
are tried in registers. Where top_p is alone, `nucleus` leaves few ids that are in question. Else each pivot is a pass.

Five launches, then `sample_pick`. The first finds the maxima of the tiles; two of `nucleus` do nothing for other rows. Then come
the cutoff of each row (one program per row), and the draw. It looks at the tiles in which something is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from actorllm_kernels.configs import lookup
from actorllm_kernels.launcher import launch
from actorllm_kernels.nucleus import (
    CAPACITY,
    GROUP,
    NucleusScratch,
    collect_kernel,
    is_nucleus,
    key_of,
    weigh_kernel,
)
from actorllm_kernels.sample_pick import TILE, Offers, SamplingState, tile_offer

KEEP_ALL = tl.constexpr(0x7F7FFFFF)
"""The key of the smallest finite y."""


@dataclass(frozen=True, slots=True)
class FilterState:
    """Columns of the state table, [num_slots] each."""

    top_k: torch.Tensor
    """int32; 0: off"""
    top_p: torch.Tensor
    """float32; 1: off"""
    min_p: torch.Tensor
    """float32; 0: off"""


@dataclass(frozen=True, slots=True)
class FilterScratch:
    """What the launches leave to each other."""

    highest: torch.Tensor
    """float32 [num_rows, num_tiles]: the largest logit of a tile, NaN if one is NaN or positive infinity"""
    mass: torch.Tensor
    """float32 [num_rows, num_tiles]: the sum of exp(logit - highest), where it was asked for"""
    order: torch.Tensor
    """int32 [num_rows, num_tiles]: tiles, those with the largest maxima first"""
    cutoff: torch.Tensor
    """int32 [num_rows]: the largest key that is kept"""
    nucleus: NucleusScratch

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> FilterScratch:
        shape = (num_rows, -(-vocab_size // TILE))
        floats = torch.empty(2, *shape, device=device)
        order = torch.empty(shape, dtype=torch.int32, device=device)
        cutoff = torch.empty(num_rows, dtype=torch.int32, device=device)
        return cls(floats[0], floats[1], order, cutoff, NucleusScratch.empty(num_rows, shape[1], device))

    def first(self, num_rows: int) -> FilterScratch:
        """The same for fewer rows."""
        return FilterScratch(
            self.highest[:num_rows],
            self.mass[:num_rows],
            self.order[:num_rows],
            self.cutoff[:num_rows],
            self.nucleus.first(num_rows),
        )


@triton.jit
def tile_maxima_kernel(
    logits_ptr,
    masks_ptr,
    mask_rows_ptr,
    highest_ptr,
    mass_ptr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    HAS_MASS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    id = tile[:, None] * 256 + tl.arange(0, 256)[None, :]
    at = logits_ptr + i * VOCAB + id
    x = tl.load(at, mask=id < VOCAB, other=-float("inf")).to(tl.float32)
    if HAS_MASKS:
        mask_row = tl.load(mask_rows_ptr + i).to(tl.int64)
        if mask_row >= 0:
            word = tl.load(masks_ptr + mask_row * NUM_WORDS + (id >> 5), mask=id < VOCAB, other=0)
            is_allowed = ((word >> (id & 31)) & 1) == 1
            x = tl.where(is_allowed, x, -float("inf"))
            tl.store(at, x.to(logits_ptr.dtype.element_ty), mask=id < VOCAB)
    is_bad = (x != x) | (x == float("inf"))
    x = tl.where(is_bad, -float("inf"), x)
    highest = tl.max(x, 1)
    if HAS_MASS:
        base = tl.where(highest > -float("inf"), highest, 0.0)
        mass = tl.sum(tl.exp(x - base[:, None]), 1)
        tl.store(mass_ptr + i * NUM_TILES + tile, mass, mask=tile < NUM_TILES)
    highest = tl.where(tl.max(is_bad.to(tl.int32), 1) > 0, float("nan"), highest)
    tl.store(highest_ptr + i * NUM_TILES + tile, highest, mask=tile < NUM_TILES)


@triton.jit
def measure(cut, num_active, logits_ptr, order_ptr, top, temperature, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """How many ids have a key of at most `cut`, and the sum of their exp(y); only the first `num_active` tiles are read."""
    counts = tl.zeros([256], tl.int32)
    masses = tl.zeros([256], tl.float32)
    for start in range(0, num_active, CHUNK):
        j = start + tl.arange(0, CHUNK)
        tile = tl.load(order_ptr + j, mask=j < num_active, other=0)
        id = tile[:, None] * 256 + tl.arange(0, 256)[None, :]
        x = tl.load(logits_ptr + id, mask=(j < num_active)[:, None] & (id < VOCAB), other=-float("inf")).to(tl.float32)
        y, key = key_of(x, top, temperature)
        is_in = key <= cut
        counts += tl.sum(is_in.to(tl.int32), 0)
        masses += tl.sum(tl.where(is_in, tl.exp(y), 0.0), 0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def between(low, high, tried):
    """The next pivot. Values in question are few and lie close: halving values finds them sooner than halving bits, which ends
    sooner where they do not.
    """
    halves = 0.5 * tl.maximum(low, 0).to(tl.float32, bitcast=True) + 0.5 * high.to(tl.float32, bitcast=True)
    middle = tl.where(tried < 12, halves.to(tl.int32, bitcast=True), low + (high - low) // 2)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def lowest_of_top_k(key, low, high, top_k):
    """The largest key of the `top_k` smallest, among `key`, which are in registers, as a bound between two keys.

    low, high: it lies above the one, and not above the other.
    """
    num_low = high * 0
    num_high = tl.sum(tl.sum((key <= high).to(tl.int32), 1), 0)
    tried = high * 0
    while (high - low > 1) & (num_high - num_low > 1) & (num_high != top_k):
        middle = between(low, high, tried)
        tried += 1
        count = tl.sum(tl.sum((key <= middle).to(tl.int32), 1), 0)
        if count >= top_k:
            high = middle
            num_high = count
        else:
            low = middle
            num_low = count
    return high


@triton.jit
def lowest_of_top_p(key, mass, low, high, above, num_high, wanted):
    """The least key at which the masses of all keys up to it are as much as is wanted, as a bound between two keys.

    key, mass: in registers. above: the mass of what comes before them. low, high: there is less up to the one, and not up to the
    other; num_high: how many keys are not above it.
    """
    num_low = num_high * 0
    tried = num_high * 0
    while (high - low > 1) & (num_high - num_low > 1):
        middle = between(low, high, tried)
        tried += 1
        is_in = key <= middle
        count = tl.sum(tl.sum(is_in.to(tl.int32), 1), 0)
        if above + tl.sum(tl.sum(tl.where(is_in, mass, 0.0), 1), 0) >= wanted:
            high = middle
            num_high = count
        else:
            low = middle
            num_low = count
    return high


@triton.jit
def cutoff_kernel(
    logits_ptr,
    highest_ptr,
    order_ptr,
    cutoff_ptr,
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
    CHUNK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + i).to(tl.int64)
    cut = i.to(tl.int32) * 0 + KEEP_ALL
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        min_p = tl.load(min_p_ptr + slot)
        has_filter = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
        if (temperature > 0.0) & has_filter:
            is_found = cut < 0
            if is_nucleus(temperature, top_k, top_p, min_p, VOCAB):
                tl.store(
                    bins_ptr + i * 256 + tl.arange(0, 256), tl.zeros([256], tl.int64)
                )  # as the next step must find them
                group = tl.arange(0, GROUPS)
                at = i * NUM_GROUPS + group
                is_group = group < NUM_GROUPS
                count = tl.load(counts_ptr + at, mask=is_group, other=0)
                above = tl.sum(tl.load(sums_ptr + at, mask=is_group, other=0.0), 0)
                wanted = top_p * tl.sum(tl.load(sums_ptr + sums_stride + at, mask=is_group, other=0.0), 0)
                place = tl.arange(0, CAPACITY)
                is_key = place[None, :] < count[:, None]
                key = tl.load(keys_ptr + at[:, None] * CAPACITY + place[None, :], mask=is_key, other=0x7FFFFFFF)
                mass = tl.where(is_key, tl.exp(0.0 - key.to(tl.float32, bitcast=True)), 0.0)
                upto = above + tl.sum(tl.sum(mass, 1), 0)
                is_found = (tl.max(count, 0) <= CAPACITY) & (above < wanted) & (upto >= wanted)
                if is_found:
                    num = tl.sum(count, 0)
                    low = tl.min(tl.min(key, 1), 0) - 1
                    high = tl.max(tl.max(tl.where(is_key, key, 0), 1), 0)
                    cut = lowest_of_top_p(key, mass, low, high, above, num, wanted)
            if not is_found:
                row_ptr = logits_ptr + i * VOCAB
                tiles_ptr = order_ptr + i * NUM_TILES
                tile = tl.arange(0, BLOCK)
                highest = tl.load(highest_ptr + i * NUM_TILES + tile, mask=tile < NUM_TILES, other=-float("inf"))
                highest = tl.where(highest != highest, -float("inf"), highest)
                top = tl.max(highest, 0)
                top = tl.where(top > -float("inf"), top, 0.0)
                _y, maxima = key_of(highest, top, temperature)
                maxima = tl.where(tile < NUM_TILES, maxima, 0x7FFFFFFF)
                packed = tl.sort((maxima.to(tl.int64) << 32) | tile.to(tl.int64))
                keys = (packed >> 32).to(tl.int32)  # of the maxima, ascending
                tl.store(tiles_ptr + tile, (packed & 0xFFFFFFFF).to(tl.int32), mask=tile < NUM_TILES)
                tl.debug_barrier()  # the order is read by other threads of this program

                if min_p > 0.0:
                    distance = 0.0 - tl.log(min_p)
                    distance = tl.where(distance > 0.0, distance, 0.0)  # never -0.0, whose bits are negative
                    cut = tl.minimum(cut, distance.to(tl.int32, bitcast=True))
                has_k = (top_k > 0) & (top_k < VOCAB)
                bound = cut
                if has_k & (top_k <= NUM_TILES):  # as many maxima are at least this, so as many ids are
                    bound = tl.minimum(bound, tl.sum(tl.where(tile == top_k - 1, keys, 0), 0))
                num_active = tl.sum((keys <= bound).to(tl.int32), 0)
                if num_active <= CHUNK:
                    # All that can be kept is read once, and the pivots are tried in registers.
                    j = tl.arange(0, CHUNK)
                    few = tl.load(tiles_ptr + j, mask=j < num_active, other=0)
                    id = few[:, None] * 256 + tl.arange(0, 256)[None, :]
                    is_there = (j < num_active)[:, None] & (id < VOCAB)
                    x = tl.load(row_ptr + id, mask=is_there, other=-float("inf")).to(tl.float32)
                    y, key = key_of(x, top, temperature)
                    if has_k:
                        cut = lowest_of_top_k(key, cut * 0 - 1, bound, top_k)
                    if top_p < 1.0:
                        is_in = key <= cut
                        mass = tl.where(is_in, tl.exp(y), 0.0)
                        num = tl.sum(tl.sum(is_in.to(tl.int32), 1), 0)
                        wanted = top_p * tl.sum(tl.sum(mass, 1), 0)
                        cut = lowest_of_top_p(key, mass, cut * 0 - 1, cut, wanted * 0.0, num, wanted)
                else:
                    if has_k:
                        low = cut * 0 - 1
                        high = bound
                        while high - low > 1:
                            middle = low + (high - low) // 2
                            active = tl.sum((keys <= middle).to(tl.int32), 0)
                            count, _mass = measure(middle, active, row_ptr, tiles_ptr, top, temperature, VOCAB, CHUNK)
                            if count >= top_k:
                                high = middle
                            else:
                                low = middle
                            if count == top_k:
                                low = high - 1
                        cut = high
                    if top_p < 1.0:
                        active = tl.sum((keys <= cut).to(tl.int32), 0)
                        num_high, total = measure(cut, active, row_ptr, tiles_ptr, top, temperature, VOCAB, CHUNK)
                        wanted = top_p * total
                        # What is below this value is, all ids together, less than half of what may be missing.
                        floor = tl.minimum(tl.log((1.0 - top_p) * total * (0.5 / VOCAB)), 0.0)
                        low = cut * 0 - 1
                        num_low = num_high * 0
                        high = tl.minimum(cut, (0.0 - floor).to(tl.int32, bitcast=True))
                        while (high - low > 1) & (num_high - num_low > 1):
                            middle = low + (high - low) // 2
                            active = tl.sum((keys <= middle).to(tl.int32), 0)
                            count, mass = measure(middle, active, row_ptr, tiles_ptr, top, temperature, VOCAB, CHUNK)
                            if mass >= wanted:
                                high = middle
                                num_high = count
                            else:
                                low = middle
                                num_low = count
                        cut = high
    tl.store(cutoff_ptr + i, cut)


@triton.jit
def draw_tiles_kernel(
    logits_ptr,
    highest_ptr,
    cutoff_ptr,
    rows_ptr,
    temperature_ptr,
    seed_ptr,
    sample_index_ptr,
    token_index_ptr,
    offer_highest_ptr,
    offer_weight_ptr,
    offer_id_ptr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + i).to(tl.int64)
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot)
        cut = tl.load(cutoff_ptr + i)
        all_tiles = tl.arange(0, BLOCK)
        maxima = tl.load(highest_ptr + i * NUM_TILES + all_tiles, mask=all_tiles < NUM_TILES, other=-float("inf"))
        top = tl.max(tl.where(maxima != maxima, -float("inf"), maxima), 0)
        top = tl.where(top > -float("inf"), top, 0.0)

        tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
        highest = tl.load(highest_ptr + i * NUM_TILES + tile, mask=tile < NUM_TILES, other=-float("inf"))
        is_greedy = temperature == 0.0
        divisor = tl.where(is_greedy, 1.0, temperature)
        _y, tile_key = key_of(highest, top, divisor)
        is_drawn = (tile_key <= cut) | (highest != highest)  # nothing is read of the others
        id = tile[None, :] * 256 + tl.arange(0, 256)[:, None]
        x = tl.load(logits_ptr + i * VOCAB + id, mask=is_drawn[None, :] & (id < VOCAB), other=-float("inf")).to(
            tl.float32
        )
        _z, key = key_of(x, top, divisor)
        x = tl.where((key <= cut) | (x != x), x, -float("inf"))
        column = tile * 0
        seed = tl.load(seed_ptr + slot) + column.to(tl.int64)
        sample_index = tl.load(sample_index_ptr + slot) + column
        token_index = tl.load(token_index_ptr + slot) + column
        offer, weight, best = tile_offer(
            x, tile, temperature + column.to(tl.float32), seed, sample_index, token_index, VOCAB
        )
        at = i * NUM_TILES + tile
        tl.store(offer_highest_ptr + at, offer, mask=tile < NUM_TILES)
        tl.store(offer_weight_ptr + at, weight, mask=tile < NUM_TILES)
        tl.store(offer_id_ptr + at, best, mask=tile < NUM_TILES)


def tile_maxima(
    logits: torch.Tensor,
    scratch: FilterScratch,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
    *,
    has_mass: bool = False,
) -> None:
    """Fills scratch.highest, and mass if asked to. What a mask forbids becomes -inf in the logits.

    logits: [num_rows, vocab_size], contiguous, of any float type. masks: int32 [num_masks, ceil(vocab_size / 32)], bit
    i % 32 of word i // 32 set where id i is allowed; mask_rows: int32 [num_rows], a row of masks or -1.
    """
    num_rows, vocab_size = logits.shape
    num_tiles = scratch.highest.shape[1]
    config = lookup("tile_maxima", "*", logits.device)
    launch(
        tile_maxima_kernel,
        (num_rows, triton.cdiv(num_tiles, config["TILES"])),
        (
            logits,
            scratch.order if masks is None else masks,
            scratch.order if mask_rows is None else mask_rows,
            scratch.highest,
            scratch.mass,
        ),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        NUM_WORDS=-(-vocab_size // 32),
        HAS_MASKS=masks is not None,
        HAS_MASS=has_mass,
        **config,
    )


def find_cutoffs(
    logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, filters: FilterState, scratch: FilterScratch
) -> None:
    """Fills scratch.cutoff; scratch.highest must be there. Three launches."""
    for step in (weigh, collect, cut):
        step(logits, rows, state, filters, scratch)


def weigh(
    logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, filters: FilterState, scratch: FilterScratch
) -> None:
    """The first launch of `find_cutoffs`."""
    num_rows, vocab_size = logits.shape
    num_tiles = scratch.highest.shape[1]
    config = lookup("weigh", "*", logits.device)
    launch(
        weigh_kernel,
        (num_rows, triton.cdiv(vocab_size, config["IDS"])),
        (logits, scratch.highest, scratch.nucleus.bins, *_wishes(rows, state, filters)),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        **config,
    )


def collect(
    logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, filters: FilterState, scratch: FilterScratch
) -> None:
    """The second."""
    num_rows, vocab_size = logits.shape
    num_tiles, nucleus = scratch.highest.shape[1], scratch.nucleus
    launch(
        collect_kernel,
        (num_rows, nucleus.counts.shape[1]),
        (logits, scratch.highest, *_found(nucleus), *_wishes(rows, state, filters)),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        GROUP=GROUP,
        NUM_GROUPS=nucleus.counts.shape[1],
        CAPACITY=CAPACITY,
        **lookup("collect", "*", logits.device),
    )


def cut(
    logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, filters: FilterState, scratch: FilterScratch
) -> None:
    """The third, which decides."""
    num_rows, vocab_size = logits.shape
    num_tiles, nucleus = scratch.highest.shape[1], scratch.nucleus
    launch(
        cutoff_kernel,
        (num_rows,),
        (logits, scratch.highest, scratch.order, scratch.cutoff, *_found(nucleus), *_wishes(rows, state, filters)),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        NUM_GROUPS=nucleus.counts.shape[1],
        GROUPS=triton.next_power_of_2(nucleus.counts.shape[1]),
        CAPACITY=CAPACITY,
        **lookup("cutoff", "*", logits.device),
    )


def _found(nucleus: NucleusScratch) -> tuple[torch.Tensor | int, ...]:
    return nucleus.bins, nucleus.sums, nucleus.counts, nucleus.keys, nucleus.sums.stride(0)


def _wishes(rows: torch.Tensor, state: SamplingState, filters: FilterState) -> tuple[torch.Tensor, ...]:
    return rows, state.temperature, filters.top_k, filters.top_p, filters.min_p


def draw_tiles(
    logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, scratch: FilterScratch, offers: Offers
) -> None:
    """Fills the offers from what the cutoffs keep; `sample_pick` must follow."""
    num_rows, vocab_size = logits.shape
    num_tiles = scratch.highest.shape[1]
    config = lookup("draw_tiles", "*", logits.device)
    launch(
        draw_tiles_kernel,
        (num_rows, triton.cdiv(num_tiles, config["TILES"])),
        (
            logits,
            scratch.highest,
            scratch.cutoff,
            rows,
            state.temperature,
            state.seed,
            state.sample_index,
            state.token_index,
            offers.highest,
            offers.weight,
            offers.id,
        ),
        VOCAB=vocab_size,
        NUM_TILES=num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        **config,
    )


def sample_topk_topp(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    filters: FilterState,
    scratch: FilterScratch,
    offers: Offers,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> None:
    """All launches; `sample_pick` must follow. rows: int32 [num_rows] slots, or -1; logits, masks: see `tile_maxima`."""
    tile_maxima(logits, scratch, masks, mask_rows)
    find_cutoffs(logits, rows, state, filters, scratch)
    draw_tiles(logits, rows, state, scratch, offers)
