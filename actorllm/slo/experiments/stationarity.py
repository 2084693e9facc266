"""Whether a run shows what its rate does in the long run, or only how long a queue takes to build up.

A run that is shorter than its promises can "sustain" any rate. A request that is promised two minutes waits in a backlog that
the end of the run dissolves. So every point carries a finding on the backlog while requests arrive (not on what is left to be
drained afterwards):

    growing      requests, or the tokens that they stand for, pile up: the rate is more than the engine can take
    short        the run lasts too little to see whether anything piles up, or arrivals are too bursty for its length
    stationary   neither

The slope of the backlog over time is fitted to means of batches, without the first fifth. Its standard error counts only as
many batches as are independent of each other by their first autocorrelation. It must be both significant and material.
Several runs of a rate are judged together (`together`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from actorllm.messages import F64
from actorllm.slo.metrics import WARM_UP
from actorllm.slo.objectives import Promises
from actorllm.slo.timeline import RunTimeline
from actorllm.types.objective import RequestClass

Verdict = Literal["stationary", "growing", "short"]
NUM_BATCHES = 25
SAMPLES_PER_BATCH = 40
MIN_SCORE = 2.5
"""Standard errors by which the slope must be above 0."""
MAX_SCORE = 100.0
MIN_DRIFT = 0.02
"""Share of the arriving work that must be left undone for a growth to matter."""
MAX_UNCERTAIN_DRIFT = 0.05
"""A growth by more of the arriving work is no proof of a stationary run, even if chance may explain it."""
MAX_UNSEEN_DRIFT = 0.1
"""Likewise for several runs together: two standard errors above their mean growth."""
MIN_RUNS = 8
"""Of fewer runs, how much they differ is chance itself: two that are behind by the same have a standard error of 0."""
MIN_REQUESTS = 100
MIN_PROMISES = 4.0
"""A run must be so many times as long as the longest promise."""


@dataclass(frozen=True, slots=True)
class Stationarity:
    """The finding with its reason."""

    verdict: Verdict
    message: str
    drift: float
    """By how much of what arrives the backlog grows: 0.1 means that a tenth of the work is not done in time."""
    score: float
    """How many standard errors that is above 0."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def backlog(timeline: RunTimeline, times: F64, weights: F64 | None = None) -> F64:
    """How many requests (or how much of their weight) had arrived and not ended by each of these times."""
    weights = np.ones(len(timeline)) if weights is None else weights
    ends = np.where(np.isfinite(timeline.end), timeline.end, np.inf)
    order = np.argsort(ends, kind="stable")
    arrived = np.concatenate(([0.0], np.cumsum(weights)))[np.searchsorted(timeline.arrival, times, side="right")]
    ended = np.concatenate(([0.0], np.cumsum(weights[order])))[np.searchsorted(ends[order], times, side="right")]
    found: F64 = arrived - ended
    return found


def judge(
    timeline: RunTimeline,
    classes: tuple[RequestClass, ...] = (),
    promises: Promises | None = None,
    due: F64 | None = None,
) -> Stationarity:
    """The finding on a run; classes, and promises of the requests' own: for the length of what they are promised.

    due: when each request would have been sent without a bound on those under way (`max_concurrency`), in order. What the bound
    holds back is backlog like any other: else a run with a bound would keep up with any rate. Where all are due at once there is
    no rate to keep up with. None: there was no bound.
    """
    if due is not None and due.size and due[-1] > due[0]:
        timeline = replace(timeline, arrival=due)
    num = len(timeline)
    if num < MIN_REQUESTS:
        return Stationarity("short", f"{num} requests are too few to tell; {MIN_REQUESTS} are needed", 0.0, 0.0)
    first, last = float(timeline.arrival[0]), float(timeline.arrival[-1])
    span = last - first
    if span <= 0:
        return Stationarity("short", "all requests arrive at once", 0.0, 0.0)
    edges = np.linspace(first + WARM_UP * span, last, NUM_BATCHES * SAMPLES_PER_BATCH + 1)
    times = (edges[1:] + edges[:-1]) / 2
    tokens = (timeline.num_prompt + np.maximum(timeline.num_output, 1)).astype(np.float64)
    found: list[tuple[float, float, float, str]] = []
    for weights, label in ((np.ones(num), "requests"), (tokens, "tokens")):
        level = backlog(timeline, times, weights)
        means = level.reshape(NUM_BATCHES, SAMPLES_PER_BATCH).mean(axis=1)
        slope, score = _slope(means)
        grown = slope * NUM_BATCHES
        arrived = float(weights[timeline.arrival >= edges[0]].sum())
        found.append((score, grown / arrived if arrived else 0.0, grown, label))
    growing = [one for one in found if one[0] >= MIN_SCORE and one[1] >= MIN_DRIFT]
    if growing:
        score, drift, grown, label = max(growing, key=lambda one: one[1])
        message = (
            f"the backlog grew by {grown:,.0f} {label} while requests came, {drift:.0%} of what arrived: more than the engine "
            f"can take; what this run shows depends on how long it is"
        )
        return Stationarity("growing", message, drift, score)
    score, drift, grown, label = max(found, key=lambda one: one[1])
    if drift > MAX_UNCERTAIN_DRIFT:
        message = (
            f"the backlog grew by {grown:,.0f} {label} while requests came, {drift:.0%} of what arrived; arrivals are too bursty "
            f"to tell that from chance: use more requests"
        )
        return Stationarity("short", message, drift, score)
    if promises is None:
        longest, whose = _longest_promise(classes, float(np.quantile(timeline.num_prompt, 0.99)))
    else:
        longest, whose = _longest_of_all(promises, timeline), "one request in a hundred"
    if span < MIN_PROMISES * longest:
        message = (
            f"requests came for {span:.0f} s, {span / longest:.1f} times the {longest:.0f} s that {whose} is promised: a backlog "
            f"may go unseen; use more requests"
        )
        return Stationarity("short", message, drift, score)
    return Stationarity("stationary", "nothing piled up", drift, score)


def together(found: Sequence[Mapping[str, Any]]) -> tuple[Verdict, str]:
    """The finding on several runs of one rate, with its reason. found: of each run what `Stationarity.to_dict` gives.

    Of a dozen runs that keep up, one looks as if it did not: bursts do that. So the growth is judged by its mean over the runs, and
    by how much they differ. Of fewer than MIN_RUNS, one must show it by itself as well.
    """
    if len(found) == 1:
        return found[0]["verdict"], found[0]["message"]
    by_verdict: dict[Verdict, list[Mapping[str, Any]]] = {"growing": [], "short": [], "stationary": []}
    for one in found:
        by_verdict[one["verdict"]].append(one)
    drifts = np.array([one.get("drift", 0.0) for one in found])
    drift, error = float(drifts.mean()), float(drifts.std(ddof=1)) / math.sqrt(drifts.size)
    changed = f"grew by {drift:.0%}" if drift >= 0 else f"fell by {-drift:.0%}"
    told = f"of {drifts.size} runs the backlog {changed} of what arrived in the mean, standard error {error:.1%}"
    seems_growing = drift >= MIN_DRIFT and drift >= MIN_SCORE * error
    if seems_growing and (by_verdict["growing"] or drifts.size >= MIN_RUNS):
        return "growing", f"{told}: more than the engine can take; what these runs show depends on how long they are"
    if len(by_verdict["growing"]) > drifts.size / 2:
        return "growing", by_verdict["growing"][0]["message"]
    if seems_growing:
        return "short", f"{told}: of so few runs that may be chance; use more seeds"
    # Short for other reasons than bursts: all runs of the rate are.
    for one in by_verdict["short"]:
        if one.get("drift", 0.0) <= MAX_UNCERTAIN_DRIFT:
            return "short", one["message"]
    if drift + 2 * error > MAX_UNSEEN_DRIFT:
        return "short", f"{told}: arrivals are too bursty to tell that from chance; use more requests, or more seeds"
    return "stationary", "nothing piled up"


def _slope(means: F64) -> tuple[float, float]:
    """Growth per batch, and how many standard errors that is above 0."""
    num = means.size
    at = np.arange(num) - (num - 1) / 2
    slope = float((at * means).sum() / (at**2).sum())
    rest = means - means.mean() - slope * at
    variance = float((rest**2).sum())
    if variance <= 1e-18:
        return slope, math.copysign(MAX_SCORE, slope) if abs(slope) > 1e-12 else 0.0
    correlation = max(0.0, float((rest[1:] * rest[:-1]).sum()) / variance)
    num_independent = max(3.0, num * (1 - correlation) / (1 + correlation))
    error = math.sqrt(variance / (num_independent - 2) / float((at**2).sum()))
    return slope, max(-MAX_SCORE, min(MAX_SCORE, slope / error))


def _longest_of_all(promises: Promises, timeline: RunTimeline) -> float:
    """Without the longest hundredth: one promise that is kept in an hour asks for no run of four hours."""
    limits = np.stack((promises.e2e, promises.ttft_limit(timeline.num_prompt)))
    longest = np.where(np.isfinite(limits), limits, 0.0).max(axis=0)
    return float(np.quantile(longest, 0.99, method="lower"))


def _longest_promise(classes: tuple[RequestClass, ...], num_prompt: float) -> tuple[float, str]:
    longest, whose = 0.0, ""
    for kind in classes:
        if kind.slo is None:
            continue
        promises = [kind.slo.e2e or 0.0]
        promises += [kind.slo.ttft + kind.slo.ttft_per_prompt_token * num_prompt] if kind.slo.ttft is not None else []
        if max(promises) > longest:
            longest, whose = max(promises), kind.name
    return longest, whose
