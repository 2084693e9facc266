"""Which variants serve the highest rate, as far as the rates that were simulated tell.

The highest rate of a variant is known to lie between two bounds (`Sustained`). It is below the lowest rate that was tried if
that one fails, and has no upper bound if the highest one attains the target. A rate at which the backlog grows is not
sustained, however many promises the run kept: in a longer run it keeps fewer.

Both variants are drawn from the same requests. One is shown to be better if its lower bound is above the upper bound of the
other in 97.5 % of the draws. All others are told as equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actorllm.messages import F64
from actorllm.slo.experiments.bands import CONFIDENCE, Aggregate, Band, band_of, crossing_bounds
from actorllm.slo.experiments.sweep import MaxRate, SweepResults
from actorllm.types.objective import Reading


@dataclass(frozen=True, slots=True, eq=False)
class Sustained:
    """The highest rate at which a variant attains a target without a growing backlog."""

    label: str
    least: float
    """Requests per second; 0: not even the lowest rate that was tried attains it."""
    most: float
    """Infinity: no rate that was tried fails."""
    lowest_tried: float
    verdict: str
    """Stationarity of the highest rate that counts; of the lowest one if none does."""
    grows_from: float | None
    """The rate from which on the target is attained only while the backlog grows; None: there is none."""
    least_draws: F64
    """[num_draws]"""
    most_draws: F64

    @property
    def is_known(self) -> bool:
        """Whether any rate attains the target."""
        return self.least > 0

    @property
    def as_rival(self) -> float:
        """What others are compared with: the known rate, or else the lowest one that was tried. It may sustain nearly that."""
        return self.least if self.is_known else self.most

    @property
    def band(self) -> Band:
        return band_of(self.least, self.least_draws, self.most_draws)


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """What a search says of all variants together."""

    best: Sustained
    """The one with the highest lower bound."""
    equal: tuple[Sustained, ...]
    """Others that are not shown to be worse, those with a known rate first."""
    worse: tuple[Sustained, ...]


def sustained(
    results: SweepResults, label: str, target: float, reading: Reading, aggregate: Aggregate = "worst"
) -> Sustained | None:
    """None: nothing was simulated of this variant."""
    rates = results.rates(label)
    if not rates:
        return None
    value = results.attained(label, reading, aggregate)
    draws = results.attainment_draws(label, reading, aggregate)
    num_reached = int((np.minimum.accumulate(value) >= target).sum())
    # The highest rates that attain the target do not count while their backlogs grow.
    num_sustained = num_reached
    while num_sustained and results.verdict(label, rates[num_sustained - 1])[0] == "growing":
        num_sustained -= 1
    grows_from = rates[num_sustained] if num_sustained < num_reached else None
    verdict = results.verdict(label, rates[max(num_sustained, 1) - 1])[0]
    if not num_sustained:
        nothing = np.zeros(draws.shape[0])
        return Sustained(label, 0.0, rates[0], rates[0], verdict, grows_from, nothing, nothing + rates[0])
    end = len(rates) if grows_from is None else num_sustained
    tried = np.array(rates[:end])
    least, most = crossing_bounds(tried, value[None, :end], target)
    least_draws, most_draws = crossing_bounds(tried, draws[:, :end], target)
    if grows_from is not None:
        most, most_draws = (np.minimum(bound, grows_from) for bound in (most, most_draws))
    return Sustained(
        label, float(least[0]), float(most[0]), rates[0], verdict, grows_from, least_draws, most_draws
    )  # fmt: skip


def sustained_rate(
    results: SweepResults, label: str, target: float, reading: Reading, aggregate: Aggregate = "worst"
) -> MaxRate | None:
    """As `SweepResults.max_rate`, without rates at which the backlog grows: how high these are hangs on how long the runs are.

    What is left is a lower bound (`leaves_out`). None: no rate attains the target, or the backlog grows at all that do.
    """
    found = results.max_rate(label, target, reading, aggregate)
    if found is None or found.verdict != "growing":
        return found
    one = sustained(results, label, target, reading, aggregate)
    return MaxRate(one.band, False, one.verdict, leaves_out=True) if one is not None and one.is_known else None


def is_better(one: Sustained, other: Sustained) -> bool:
    """Whether the draws show that `one` sustains more."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(one.least_draws > 0, one.least_draws / other.most_draws, 0.0)
    return float(np.quantile(ratios, (1 - CONFIDENCE) / 2, method="lower")) > 1


def sustained_ratio(one: Sustained, other: Sustained) -> Band | None:
    """How many times what `other` sustains, with paired draws; None: the rate of one of them is not known.

    If the rate of `other` alone is unknown, it is below the lowest one that was tried. The ratio to that one is a lower bound.
    """
    if not one.is_known:
        return None
    least = one.least_draws / other.most_draws
    if not other.is_known:
        low = float(np.quantile(least, (1 - CONFIDENCE) / 2, method="lower"))
        value = one.least / other.most
        return Band(value, min(low, value), value, high_is_open=True)
    with np.errstate(divide="ignore"):
        return band_of(one.least / other.least, least, one.most_draws / other.least_draws)


def standing(
    results: SweepResults, labels: Sequence[str], target: float, reading: Reading, aggregate: Aggregate = "worst"
) -> Standing | None:
    """None: no variant attains the target at a rate that was tried and at which its backlog does not grow."""
    found = [one for label in labels if (one := sustained(results, label, target, reading, aggregate)) is not None]
    if not any(one.is_known for one in found):
        return None
    best = max(found, key=lambda one: one.least)
    others = sorted((one for one in found if one is not best), key=lambda one: (-one.least, -one.most))
    equal = tuple(one for one in others if not is_better(best, one))
    return Standing(best, equal, tuple(one for one in others if one not in equal))


def attainment_difference(
    results: SweepResults, label: str, other: str, rate: float, reading: Reading, aggregate: Aggregate = "worst"
) -> Band:
    """By how much the attainment of `label` at a rate is above that of `other`, on the same requests."""
    values = [results.band(name, rate, reading, aggregate).value for name in (label, other)]
    mine, theirs = (results.draws_at(name, rate, reading, aggregate) for name in (label, other))
    low, high = np.quantile(mine - theirs, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)).tolist()
    value = values[0] - values[1]
    return Band(value, min(low, value), max(high, value))
