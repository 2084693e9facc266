"""How sure an attainment is: bootstrap bands over seeds and requests.

Requests that come together fare together. So seeds are drawn anew first, and then no single requests but blocks of consecutive
ones. Every point is cut into such blocks (`record.NUM_BLOCKS`). The draws are the same for all points with the same number
of seeds. With common random numbers, differences between two variants are sharper than their bands.

A band is never narrower than independent requests would make it (Wilson 1927). A hundred good ones out of a hundred leave
room for a bad one, which no drawing from them shows. Copies of a request, where a trace is shorter than what is drawn from it,
count once there.

A highest rate is only known where rates were simulated. A draw that fails at the lowest of them is somewhere below it, and one
that does well at the highest somewhere above. A band whose end is such a draw is open there (`Band`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64
from actorllm.slo.workload import seed_stream
from actorllm.types.objective import Reading

Aggregate = Literal["worst", "overall"]
AGGREGATES: tuple[Aggregate, ...] = ("worst", "overall")
NUM_DRAWS = 1000
CONFIDENCE = 0.95

Blocks = Mapping[str, Any]
"""Of a point: n, tpot and deadline, each [num_blocks][num_classes]: how many requests, and how many of them were good."""


@dataclass(frozen=True, slots=True)
class Band:
    value: float
    low: float
    high: float
    low_is_open: bool = False
    """The end is somewhere below `low`."""
    high_is_open: bool = False
    """The end is somewhere above `high`."""

    def scaled(self, factor: float) -> Band:
        return replace(self, value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def ends(self, told: Callable[[float], str] = "{:.2f}".format) -> tuple[str, str]:
        """Both ends for people: < 1.83 where it is somewhere below."""
        return ("< " if self.low_is_open else "") + told(self.low), ("> " if self.high_is_open else "") + told(
            self.high
        )


def attainment_of(num: F64, good: F64, aggregate: Aggregate) -> F64:
    """[..., num_classes] counts to shares: of all requests, or of the class that is worst off."""
    with np.errstate(invalid="ignore", divide="ignore"):
        if aggregate == "overall":
            found: F64 = good.sum(axis=-1) / num.sum(axis=-1)
        else:
            found = np.where(num > 0, good / num, np.inf).min(axis=-1)
    return found


def _counts(points: Sequence[Blocks], reading: Reading) -> tuple[F64, F64]:
    """[num_seeds, num_blocks, num_classes] of all and of good requests."""
    return np.array([p["n"] for p in points], float), np.array([p[reading] for p in points], float)


def drawn(points: Sequence[Blocks], reading: Reading, aggregate: Aggregate, num_draws: int = NUM_DRAWS) -> F64:
    """[num_draws] attainments of as many seeds and blocks, drawn with replacement. points: one for each seed."""
    num, good = _counts(points, reading)
    num_seeds, num_blocks, num_classes = num.shape
    times = _times_drawn(num_seeds, num_blocks, num_draws)
    # Sums of whole numbers, so their order does not matter.
    return attainment_of(times @ num.reshape(-1, num_classes), times @ good.reshape(-1, num_classes), aggregate)


def _draws(num_seeds: int, num_blocks: int, num_draws: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which seeds each draw has, and which blocks of each of them."""
    rng = seed_stream(0, "bootstrap")
    return (
        rng.integers(0, num_seeds, (num_draws, num_seeds)),
        rng.integers(0, num_blocks, (num_draws, num_seeds, num_blocks)),
    )


@lru_cache(maxsize=2)
def _times_drawn(num_seeds: int, num_blocks: int, num_draws: int) -> F64:
    """[num_draws, num_seeds * num_blocks]: how often each draw has each block. The same for all points of a sweep."""
    seeds, blocks = _draws(num_seeds, num_blocks, num_draws)
    size = num_seeds * num_blocks
    cell = (np.arange(num_draws) * size)[:, None, None] + seeds[:, :, None] * num_blocks + blocks
    found: F64 = np.bincount(cell.ravel(), minlength=num_draws * size).reshape(num_draws, size).astype(np.float64)
    return found


def attainment_band(
    points: Sequence[Blocks],
    reading: Reading,
    aggregate: Aggregate,
    confidence: float = CONFIDENCE,
    distinct: float = 1.0,
) -> Band:
    """points: one for each seed, of one variant at one rate. distinct: share of their requests that are no copies of others."""
    num, good = (counts.sum(axis=(0, 1)) for counts in _counts(points, reading))
    value = float(attainment_of(num, good, aggregate))
    low, high = np.quantile(drawn(points, reading, aggregate), ((1 - confidence) / 2, (1 + confidence) / 2)).tolist()
    if aggregate == "overall":
        size = float(num.sum())
    else:
        shares = np.where(num > 0, good / np.maximum(num, 1), np.inf)
        size = float(num[int(shares.argmin())])
    floor, ceiling = wilson(value, size * distinct, confidence)
    return Band(value, min(low, floor), max(high, ceiling))


def wilson(share: float, size: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of Wilson (1927) for a share of so many independent trials."""
    if not size:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return max(0.0, centre - half), min(1.0, centre + half)


def crossing(rates: F64, attained: F64, target: float) -> F64:
    """[...]: the highest rate at which the target is reached; attained: [..., num_rates], rates increasing.

    What a rate attains counts as no more than what the one before it does, and between two rates the attainment lies on a
    straight line. 0: not even the lowest rate reaches it; the highest rate: all do.
    """
    envelope = np.minimum.accumulate(attained, axis=-1)
    reached = envelope >= target
    num = reached.sum(axis=-1)
    at = np.clip(num - 1, 0, rates.size - 1)
    after = np.minimum(at + 1, rates.size - 1)
    above = np.take_along_axis(envelope, at[..., None], -1)[..., 0]
    below = np.take_along_axis(envelope, after[..., None], -1)[..., 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(above > below, (above - target) / (above - below), 0.0)
    found: F64 = np.where(num == 0, 0.0, rates[at] + np.clip(share, 0, 1) * (rates[after] - rates[at]))
    return found


def crossing_bounds(rates: F64, attained: F64, target: float) -> tuple[F64, F64]:
    """[...] twice: what the highest rates (`crossing`) are at least and at most.

    They differ where even the lowest rate fails (0 and that rate), and where all succeed (the highest rate and infinity).
    """
    least = crossing(rates, attained, target)
    is_above = attained.min(axis=-1) >= target
    most = np.where(attained[..., 0] < target, rates[0], np.where(is_above, np.inf, least))
    return least, most


def band_of(value: float, least: F64, most: F64, confidence: float = CONFIDENCE) -> Band:
    """Of draws that lie somewhere between least and most; an end that only 0 or infinity bounds is open."""
    below, above = (1 - confidence) / 2, (1 + confidence) / 2
    low, high = _quantile(least, below, "lower"), _quantile(most, above, "higher")
    low_is_open, high_is_open = low <= 0, high == math.inf
    low = _quantile(most, below, "lower") if low_is_open else low
    high = _quantile(least, above, "higher") if high_is_open else high
    return Band(value, min(low, value), max(high, value), low_is_open, high_is_open)


def _quantile(draws: F64, share: float, method: Literal["lower", "higher"]) -> float:
    """One of the draws: between a number and infinity there is no middle."""
    return float(np.quantile(draws, share, method=method))
