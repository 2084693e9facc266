"""Choosing the next token of every row from its logits, on the CPU.

Owns the one definition of docs/sampling.md in its vectorised form. temperature, min_p, top_k and top_p keep a set of ids. Of
these a tile of 256 ids is drawn by its logsumexp plus noise, then an id within the tile by its logit plus noise. The
noise is a function of seed, sample index, token index and id (actorllm.model.philox). So the choice does not depend on
what else is in the batch, nor on where a stream was taken up again. Temperature 0 is the argmax of the logits as given.

Rows never influence each other. A row with NaN or infinite logits gets some id of the vocabulary and raises nothing (the
caller reports such rows). The model runner calls `Sampler.sample` once a step, on one thread.

The masses of rows that keep every id come from torch's softmax, which is one pass over the logits on all threads. The
rest is numpy on purpose. At these sizes its argmax, exp and partition are several times faster than torch's on one
thread, and a call costs less.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.philox import ID_DOMAIN, TILE_DOMAIN, gumbel_noise, round_keys

F32: TypeAlias = NDArray[np.float32]
I32: TypeAlias = NDArray[np.int32]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]

TILE = 256
"""Ids per tile."""
GROUP = 4
"""Ids per Philox call."""

CHUNK_ELEMENTS = 1 << 16
"""Logits filtered at a time: they and their exponentials stay in the second-level cache."""

BLOCK = 64
"""Sorted logits whose mass is added up at once, where a nucleus is looked for."""


@dataclass(slots=True)
class SamplingColumns:
    """How to sample each row of a batch. What follows from the parameters is computed once, when this is built.

    `token_index` is how many tokens the row has had before this one. It is the only column that a steady decode changes,
    and the only one that may be written to after construction (`columns.token_index += 1`).
    """

    temperature: F32
    """0 is greedy."""
    top_k: I32
    """0 keeps all."""
    top_p: F32
    min_p: F32
    seeds: U64
    sample_index: I32
    token_index: I32

    all_greedy: bool = field(init=False)
    sampled_rows: NDArray[np.intp] | None = field(init=False)
    """The rows that are not greedy; None: every row."""
    sampled: SampledColumns = field(init=False)
    """The columns of those rows."""

    def __post_init__(self) -> None:
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "sample_index", "token_index")
        shapes = {name: getattr(self, name).shape for name in names}
        if any(shape != (len(self.temperature),) for shape in shapes.values()):
            raise ValueError(f"the columns differ in length: {shapes}")
        is_sampled = self.temperature > 0
        self.sampled_rows = None if is_sampled.all() else np.flatnonzero(is_sampled)
        self.all_greedy = not is_sampled.any()
        rows = slice(None) if self.sampled_rows is None else self.sampled_rows
        self.sampled = SampledColumns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seeds[rows],
            self.sample_index[rows],
        )

    def __len__(self) -> int:
        return len(self.temperature)

    @classmethod
    def of_slots(cls, columns: Any, slots: I32) -> SamplingColumns:
        """Those of some slots of a worker's batch (`model.inputs.Columns`)."""
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "sample_index", "num_outputs")
        return cls(*(getattr(columns, name)[slots] for name in names))

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingColumns:
        """Columns for `num_rows` greedy rows."""
        return cls(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            top_p=np.ones(num_rows, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            seeds=np.zeros(num_rows, np.uint64),
            sample_index=np.zeros(num_rows, np.int32),
            token_index=np.zeros(num_rows, np.int32),
        )


@dataclass(slots=True)
class SampledColumns:
    """The rows of a batch that are not greedy, as the sampler wants them."""

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    seeds: U64
    sample_index: I32

    divisor: F32 = field(init=False)
    """Temperatures, [num_rows, 1]."""
    is_scaled: bool = field(init=False)
    """Some temperature is not 1."""
    log_min_p: F32 = field(init=False)
    keys: U32 = field(init=False)
    filtered: NDArray[np.intp] = field(init=False)
    """Rows that do not keep every id."""
    unfiltered: NDArray[np.intp] | None = field(init=False)
    """The others; None: all are."""

    def __post_init__(self) -> None:
        self.divisor = self.temperature[:, None]
        self.is_scaled = bool((self.temperature != 1).any())
        with np.errstate(divide="ignore"):
            self.log_min_p = np.log(self.min_p)
        self.keys = round_keys(self.seeds)
        is_filtered = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        self.filtered = np.flatnonzero(is_filtered)
        self.unfiltered = np.flatnonzero(~is_filtered) if is_filtered.any() else None


class Sampler:
    """Samples rows of `vocab_size` logits. Holds scratch memory and no state."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size <= 0:
            raise ValueError(f"vocab_size={vocab_size} must be positive")
        self.vocab_size = vocab_size
        self.num_tiles = -(-vocab_size // TILE)
        self._chunk_rows = max(1, CHUNK_ELEMENTS // vocab_size)
        # The exponentials of a chunk, padded to whole tiles with zeros that are never written to.
        self._exp: F32 = np.zeros((self._chunk_rows, self.num_tiles * TILE), np.float32)
        self._tile_groups = np.arange(-(-self.num_tiles // GROUP), dtype=np.uint32)
        self._id_groups = np.arange(TILE // GROUP, dtype=np.uint32)
        self._lanes = np.arange(TILE)

    def sample(self, logits: torch.Tensor, columns: SamplingColumns) -> I32:
        """The next token of every row, int32 [num_rows]. logits: [num_rows, vocab_size] float32."""
        tokens, _ = self._sample(logits, columns, with_margin=False)
        return tokens

    def sample_with_margin(self, logits: torch.Tensor, columns: SamplingColumns) -> tuple[I32, F32]:
        """As `sample`, and by how much each choice was made: float32 [num_rows].

        The margin is the difference between the best and the second best logit plus noise, the smaller of the two
        stages; of a greedy row, that of the logits. A smaller change of the logits cannot change the token.
        """
        return self._sample(logits, columns, with_margin=True)

    def _sample(self, logits: torch.Tensor, columns: SamplingColumns, *, with_margin: bool) -> tuple[I32, F32]:
        num_rows = columns.temperature.size
        if logits.shape != (num_rows, self.vocab_size):
            raise ValueError(f"logits of shape {list(logits.shape)}, not [{num_rows}, {self.vocab_size}]")
        logits = logits.detach().float().contiguous()
        x: F32 = logits.numpy()
        # rows with NaN or infinity are the caller's business
        with np.errstate(all="ignore"):
            if columns.all_greedy:
                return x.argmax(axis=1).astype(np.int32), _gap(x) if with_margin else _NO_MARGIN
            rows = columns.sampled_rows
            if rows is None:
                return self._draw(logits, columns.sampled, columns.token_index, with_margin=with_margin)
            tokens: I32 = x.argmax(axis=1).astype(np.int32)
            margins = _gap(x) if with_margin else _NO_MARGIN
            token_index = columns.token_index[rows]
            sampled = logits.index_select(0, torch.from_numpy(rows))
            tokens[rows], drawn = self._draw(sampled, columns.sampled, token_index, with_margin=with_margin)
            if with_margin:
                margins[rows] = drawn
            return tokens, margins

    def _draw(
        self, logits: torch.Tensor, columns: SampledColumns, token_index: I32, *, with_margin: bool
    ) -> tuple[I32, F32]:
        """Both stages, for rows that are not greedy."""
        num_rows = columns.temperature.size
        x: F32 = logits.numpy()
        # No choice depends on the row maximum that is subtracted, and near 0 float32 is finest.
        maximum = logits.amax(1, keepdim=True)
        highest: F32 = maximum.numpy()
        mass = self._tile_masses(logits, maximum, columns)  # [num_rows, num_tiles]
        threshold: F32 | None = None
        if len(columns.filtered):
            threshold = np.full(num_rows, -np.inf, np.float32)
            for start in range(0, len(columns.filtered), self._chunk_rows):
                rows = columns.filtered[start : start + self._chunk_rows]
                mass[rows], threshold[rows] = self._kept_masses(x[rows], highest[rows], columns, rows)

        noise = gumbel_noise(columns.keys, token_index, columns.sample_index, self._tile_groups, TILE_DOMAIN)
        score = np.log(mass, out=mass)
        score += noise[:, : self.num_tiles]
        tile = score.argmax(axis=1)

        z = self._tile_logits(x, tile)  # [num_rows, TILE]
        z -= highest
        if columns.is_scaled:
            z /= columns.divisor
        if threshold is not None:
            # adds 0 or -inf: np.where on an unpredictable mask is slower by far
            z += np.log(z >= threshold[:, None], dtype=np.float32)
        groups = self._id_groups + (tile * (TILE // GROUP)).astype(np.uint32)[:, None]
        z += gumbel_noise(columns.keys, token_index, columns.sample_index, groups, ID_DOMAIN)
        lane = z.argmax(axis=1)

        tokens: I32 = (tile * TILE + lane).astype(np.int32)
        return tokens, np.minimum(_gap(score), _gap(z)) if with_margin else _NO_MARGIN

    def _tile_masses(self, logits: torch.Tensor, maximum: torch.Tensor, columns: SampledColumns) -> F32:
        """The probability of every tile, [num_rows, num_tiles], in rows that keep every id; others are not filled in."""
        rows, divisor = columns.unfiltered, columns.divisor
        if rows is not None:
            if not len(rows):
                return np.empty((columns.temperature.size, self.num_tiles), np.float32)
            index = torch.from_numpy(rows)
            logits, maximum, divisor = logits.index_select(0, index), maximum.index_select(0, index), divisor[rows]
        if columns.is_scaled:
            # The maximum goes first, as everywhere: large quotients are coarse, and those of a tiny temperature infinite.
            logits = torch.sub(logits, maximum).div_(torch.from_numpy(divisor))
        probability = torch.softmax(logits, 1)
        whole = self.vocab_size // TILE
        mass = probability[:, : whole * TILE].view(len(logits), whole, TILE).sum(-1)
        if whole < self.num_tiles:
            mass = torch.cat((mass, probability[:, whole * TILE :].sum(-1, keepdim=True)), 1)
        if rows is None:
            return mass.numpy()
        masses = np.empty((columns.temperature.size, self.num_tiles), np.float32)
        masses[rows] = mass.numpy()
        return masses

    def _kept_masses(self, y: F32, highest: F32, columns: SampledColumns, rows: NDArray[np.intp]) -> tuple[F32, F32]:
        """What is kept of every tile, up to a factor per row, and the smallest scaled logit to keep. Overwrites y."""
        y -= highest
        if columns.is_scaled:
            y /= columns.divisor[rows]
        padded = self._exp[: len(y)]
        e = padded[:, : self.vocab_size]
        np.exp(y, out=e)
        threshold = _filter(y, e, columns, rows)
        mass: F32 = padded.reshape(len(y), self.num_tiles, TILE).sum(axis=-1)
        return mass, threshold

    def _tile_logits(self, x: F32, tile: NDArray[np.intp]) -> F32:
        """The logits of one tile of every row, [num_rows, TILE]; -inf past the end of the vocabulary."""
        num_rows, rest = len(x), self.vocab_size % TILE
        if not rest:
            picked: F32 = x.reshape(num_rows, self.num_tiles, TILE)[np.arange(num_rows), tile]
            return picked
        ids = np.minimum((tile * TILE)[:, None] + self._lanes, self.vocab_size - 1)
        picked = np.take_along_axis(x, ids, axis=1)
        picked[tile == self.num_tiles - 1, rest:] = -np.inf
        return picked


_NO_MARGIN: F32 = np.zeros(0, np.float32)


def _gap(scores: F32) -> F32:
    """The best minus the second best of every row."""
    if scores.shape[1] == 1:
        return np.full(len(scores), np.inf, np.float32)
    best = np.partition(scores, -2, axis=1)
    gap: F32 = best[:, -1] - best[:, -2]
    return gap


def _filter(y: F32, e: F32, columns: SampledColumns, index: NDArray[np.intp]) -> F32:
    """The smallest logit that each row keeps; sets e to 0 below it.

    y: logits with maximum 0, e: their exponentials, both [num_rows, vocab_size]; index: which rows of `columns` they are.
    Each filter keeps whatever is at least a threshold, so that equal logits share their fate, and the thresholds
    combine by their maximum.
    """
    vocab_size = y.shape[1]
    threshold: F32 = columns.log_min_p[index]
    top_k = columns.top_k[index]
    top_p = columns.top_p[index].astype(np.float64)
    by_rank = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    by_mass = np.flatnonzero(top_p < 1)
    if not len(by_rank) and not len(by_mass):
        e *= y >= threshold[:, None]
        return threshold

    # Only the largest logits are sorted; if a nucleus turns out to be larger than that, its row is sorted as a whole.
    num_top = max(vocab_size // 16, 1)
    if len(by_rank):
        num_top = max(num_top, int(top_k[by_rank].max()))
    top = _largest(y, num_top)
    if len(by_rank):
        kth = top[by_rank, top_k[by_rank] - 1]
        threshold[by_rank] = np.maximum(threshold[by_rank], kth)
    e *= y >= threshold[:, None]
    if not len(by_mass):
        return threshold

    wanted = top_p * e.sum(axis=1, dtype=np.float64)
    nucleus, is_found = _nucleus(top, threshold, wanted)
    missing = by_mass[~is_found[by_mass]]
    if len(missing):
        nucleus[missing], _ = _nucleus(_largest(y[missing], vocab_size), threshold[missing], wanted[missing])
    threshold[by_mass] = nucleus[by_mass]
    e *= y >= threshold[:, None]
    return threshold


def _largest(y: F32, count: int) -> F32:
    """The `count` largest of every row, largest first."""
    vocab_size = y.shape[1]
    top: F32 = y.copy() if count >= vocab_size else np.partition(y, vocab_size - count, axis=1)[:, vocab_size - count :]
    top.sort(axis=1)
    return np.ascontiguousarray(top[:, ::-1])  # what follows is slow backwards


def _nucleus(top: F32, threshold: F32, wanted: NDArray[np.float64]) -> tuple[F32, NDArray[Any]]:
    """The largest of the logits in `top` at or above which the mass is at least `wanted`, and if there is one.

    top: logits, largest first. threshold: what is below does not count. The last logit that counts is the answer where
    rounding alone keeps the mass from being reached; where `top` ends before that, there is none.
    """
    num_rows, num_top = top.shape
    e = np.exp(top)
    # First the block in which the mass is reached, then the place in the block: a running sum is slow, a sum is not.
    block_mass = np.add.reduceat(e, np.arange(0, num_top, BLOCK), axis=1).cumsum(axis=1, dtype=np.float64)
    block = np.minimum((block_mass < wanted[:, None]).sum(axis=1), block_mass.shape[1] - 1)
    before = np.where(block > 0, block_mass[np.arange(num_rows), block - 1], 0.0)
    places = np.minimum((block * BLOCK)[:, None] + np.arange(BLOCK), num_top - 1)
    mass = before[:, None] + np.take_along_axis(e, places, axis=1).cumsum(axis=1, dtype=np.float64)
    position = block * BLOCK + (mass < wanted[:, None]).sum(axis=1)

    num_kept = np.count_nonzero(top >= threshold[:, None], axis=1)
    is_found = (position < num_kept) | (num_kept < num_top)
    nucleus: F32 = top[np.arange(num_rows), np.minimum(position, np.maximum(num_kept, 1) - 1)]
    return nucleus, is_found
