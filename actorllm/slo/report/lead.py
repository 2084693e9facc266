"""The first sentences of the page on a sweep: only what was searched for, and only differences that the paired bands show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actorllm.slo.experiments.comparison import Standing, Sustained, attainment_difference, standing, sustained_ratio
from actorllm.slo.experiments.point import NO_PROMISES
from actorllm.slo.experiments.sweep import SweepResults
from actorllm.slo.report.charts import number, percent
from actorllm.types.objective import READINGS, Reading

READS = {"tpot": "mean gap", "deadline": "due dates"}
"""What the two readings of a promise per token are called for people."""
MAX_NAMED = 4
"""Variants that a sentence names; of more it tells how many there are."""


def lead(results: SweepResults, rate: float, baseline: str) -> list[str]:
    """The differences that matter most, in a few sentences.

    rate: the one told of if no highest rates were searched for. baseline: the label that a sole winner is compared with.
    """
    labels = [label for label in results.labels() if results.rates(label)]
    if not labels:
        return []
    if promises_nothing(results):
        return [
            "Nothing was promised to any request, so each that ends counts as kept: give classes with objectives (mix)."
        ]
    if not results.targets:
        if not any(rate in results.rates(label) for label in labels):
            return []
        return [_at_rate(results, labels, rate, reading) for reading in READINGS] + _growing(results, labels, rate)
    # The strictest target that some variant attains is told in both readings; if there is none, the strictest of all.
    found = [(t, [standing(results, labels, t, r) for r in READINGS]) for t in results.targets]
    target, standings = next((one for one in found if any(one[1])), found[0])
    told = []
    for reading, one in zip(READINGS, standings, strict=True):
        told += _none(results, labels, target, reading) if one is None else _of(results, one, target, reading, baseline)
    # Only a sole winner is a winner.
    winners = {one.best.label for one in standings if one is not None and not one.equal}
    if len(winners) > 1:
        told.append("The two readings of a promise per token have different winners: which one is meant decides.")
    return list(dict.fromkeys(told))


def promises_nothing(results: SweepResults) -> bool:
    """Whether no request of any point was promised anything, as the points themselves warn."""
    return all(any(text.startswith(NO_PROMISES) for text in record["warnings"]) for record in results.records)


def figure_of(one: Sustained) -> str:
    """The highest rate of a variant in requests per second, as far as it is known."""
    if not one.is_known:
        return f"< {number(one.lowest_tried)}"
    least = "≥ " if one.most == math.inf or one.grows_from is not None else ""
    return f"{least}{number(one.least)} [{', '.join(one.band.ends(number))}]"


def _none(results: SweepResults, labels: Sequence[str], target: float, reading: Reading) -> list[str]:
    lowest = min(results.rates(label)[0] for label in labels)
    return [
        f"By {READS[reading]}, no policy keeps {_share(target)} of the promises to the worst class without a growing backlog "
        f"at any rate that was tried; the lowest is {number(lowest)} requests/s."
    ]


def _of(results: SweepResults, one: Standing, target: float, reading: Reading, baseline: str) -> list[str]:
    best, of_worst = one.best, f"with {_share(target)} of the worst class on time"
    if one.equal:
        named = [best, *one.equal]
        rest = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        figures = ", ".join(f"{each.label} {figure_of(each)}" for each in named[:MAX_NAMED])
        text = f"By {READS[reading]}, no policy is shown to serve the most {of_worst}: {figures}{rest} requests/s"
        text += " are not told apart"
        if one.worse:
            text += f"; {_names(one.worse)} {'serves' if len(one.worse) == 1 else 'serve'} less"
    elif one.worse:
        text = f"By {READS[reading]}, {best.label} serves the most: {_up_to(best)} requests/s {of_worst}"
        text += _times(one, baseline)
    else:  # there is no other one
        text = f"By {READS[reading]}, {best.label} serves {_up_to(best)} requests/s {of_worst}"
    told = [text + "."]
    told += [
        f"Of {each.label}, rates from {number(each.grows_from)} requests/s on do not count: the backlog grows there."
        for each in (best, *one.equal, *one.worse)
        if each.grows_from is not None
    ]
    if best.verdict == "short":
        told.append(
            f"The run of {best.label} at that rate was too short to see whether its backlog grows: use more requests."
        )
    return told


def _times(one: Standing, baseline: str) -> str:
    """How many times as much as the baseline a sole winner serves; nothing if their rates are not known well enough."""
    base = next((each for each in one.worse if each.label == baseline and each.is_known), None)
    if base is None or one.best.grows_from is not None or base.grows_from is not None:
        return ""
    ratio = sustained_ratio(one.best, base)
    return f", {number(ratio.value)} times as much as {baseline} [{', '.join(ratio.ends(number))}]" if ratio else ""


def _up_to(one: Sustained) -> str:
    figure = figure_of(one)
    return f"at least {figure[2:]}" if figure.startswith("≥ ") else f"up to {figure}"


def _at_rate(results: SweepResults, labels: Sequence[str], rate: float, reading: Reading) -> str:
    """Without a search: which variant keeps most promises at one rate."""
    there = [label for label in labels if rate in results.rates(label)]
    kept = {label: results.band(label, rate, reading) for label in there}
    best = max(there, key=lambda label: kept[label].value)
    equal = [x for x in there if x != best and attainment_difference(results, best, x, rate, reading).low <= 0]
    about = f"By {READS[reading]}, at {number(rate)} requests/s (no highest rate was searched for), "
    share = f"{percent(kept[best].value)} [{percent(kept[best].low)}, {percent(kept[best].high)}]"
    if len(there) == 1:
        return f"{about}{best} keeps {share} of the promises to the worst class."
    if not equal:
        return f"{about}{best} keeps the most promises to the worst class, {share}."
    named = [best, *equal]
    figures = ", ".join(f"{label} {percent(kept[label].value)}" for label in named[:MAX_NAMED])
    rest = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return f"{about}{figures}{rest} of the promises to the worst class are not told apart."


def _growing(results: SweepResults, labels: Sequence[str], rate: float) -> list[str]:
    """Which variants cannot take that rate: what they keep at it is no finding."""
    found = [label for label in labels if rate in results.rates(label) and results.verdict(label, rate)[0] == "growing"]
    if not found:
        return []
    return [f"At that rate the backlog of {_listed(found)} grows: what a run keeps then depends on how long it is."]


def _names(found: Sequence[Sustained]) -> str:
    return _listed([one.label for one in found])


def _listed(labels: Sequence[str]) -> str:
    names = list(labels[:MAX_NAMED])
    if len(labels) > MAX_NAMED:
        names.append(f"{len(labels) - MAX_NAMED} more")
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _share(target: float) -> str:
    return f"{100 * target:g}%"
