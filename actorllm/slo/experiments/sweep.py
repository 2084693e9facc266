"""`Sweep`: a grid of points, and searches for the highest rates, over all cores; and what comes out of it.

    sweep = Sweep(Scenario(num_requests=2000), [Variant.parse("fcfs@512"), Variant.parse("edf@512")], seeds=(0, 1, 2))
    results = sweep.run(rates=(2, 3, 4), targets=(0.99, 0.9), store="results.jsonl")
    results.band("edf@512", 3.0, "deadline", "worst")           # Band(value, low, high)
    results.max_rate("edf@512", 0.99, "deadline", "worst")      # MaxRate(rate, low, high, ...)

What comes out depends on the arguments only: not on the number of processes, nor on what a results file held before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from actorllm.errors import ConfigError
from actorllm.messages import F64
from actorllm.slo.experiments.bands import (
    AGGREGATES,
    Aggregate,
    Band,
    attainment_band,
    attainment_of,
    band_of,
    crossing,
    crossing_bounds,
    drawn,
)
from actorllm.slo.experiments.point import LEFT_OUT, NO_PROMISES, Point, Scenario, Variant
from actorllm.slo.experiments.pool import PointError, Pool
from actorllm.slo.experiments.search import FIRST_STRIDE, Ladder, search
from actorllm.slo.experiments.stamp import stamp
from actorllm.slo.experiments.stationarity import Verdict, together
from actorllm.slo.experiments.store import Store
from actorllm.types.objective import READINGS, Reading

Record = dict[str, Any]
TARGETS = (0.99, 0.9, 0.5)
MAX_WIDENINGS = 3
"""How often a search goes on by FIRST_STRIDE rungs down, and as many up, for the sake of a band."""


class Progress(Protocol):
    """Is told of every point: how many are done, how many are asked for so far, and which one it was."""

    def __call__(self, num_done: int, num_known: int, point: Point) -> None: ...


@dataclass(frozen=True, slots=True)
class MaxRate:
    """The highest rate at which a target is attained."""

    band: Band
    """Bootstrapped; open where it ends beyond the rates that were simulated."""
    is_bounded: bool
    """Whether a rate above it was tried and failed; if not, the truth may lie above."""
    verdict: str
    """Stationarity of the highest rate simulated that attains the target, of all seeds together."""
    leaves_out: bool = False
    """Whether higher ones attain it while the backlog grows, and do not count (`comparison.sustained_rate`)."""

    @property
    def caveats(self) -> list[Verdict]:
        """What is marked beside it: `growing` if rates are left out for that, `short` if the run of the one that counts was."""
        found: list[Verdict] = ["growing"] if self.leaves_out or self.verdict == "growing" else []
        return [*found, "short"] if self.verdict == "short" else found

    @property
    def rate(self) -> float:
        """Requests per second; where the attainment crosses the target between two rates that were simulated."""
        return self.band.value

    @property
    def low(self) -> float:
        return self.band.low

    @property
    def high(self) -> float:
        return self.band.high


@dataclass(frozen=True, slots=True, eq=False)
class SweepResults:
    """Points by variant, rate, seed and scale, and what they say together."""

    scenario: Scenario
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    records: tuple[Record, ...]
    failures: tuple[PointError, ...] = ()
    notes: tuple[str, ...] = ()
    stamp: dict[str, Any] = field(default_factory=stamp)
    targets: tuple[float, ...] = ()
    """Shares whose highest rates were searched for, the strictest first; other shares are known only as far as rates happen
    to have been simulated."""
    _index: dict[tuple[str, float, float], list[Record]] = field(default_factory=dict, init=False, repr=False)
    """By label, rate and scale; the seeds in order."""
    _drawn: dict[tuple[Any, ...], F64] = field(default_factory=dict, init=False, repr=False)
    _compared: set[int] = field(default_factory=set, init=False, repr=False)
    """The largest set of seeds that anything was simulated with: what has others is of other requests."""
    _rates: dict[tuple[str, float], list[float]] = field(default_factory=dict, init=False, repr=False)
    """By label and scale: those that all of these seeds were simulated at."""

    def __post_init__(self) -> None:
        for record in sorted(self.records, key=lambda r: int(r["seed"])):
            self._index.setdefault((record["variant"]["label"], record["rate"], record["scale"]), []).append(record)
        seeds = {key: {int(record["seed"]) for record in there} for key, there in self._index.items()}
        most = max((len(there) for there in seeds.values()), default=0)
        self._compared.update(next((there for there in seeds.values() if len(there) == most), ()))
        for label, rate, scale in sorted(key for key, found in seeds.items() if found == self._compared):
            self._rates.setdefault((label, scale), []).append(rate)

    def __repr__(self) -> str:
        """Short: a notebook shows what its last line gives."""
        return f"<SweepResults: {len(self.records)} points of {', '.join(self.labels())}; {self.describe()}>"

    def describe(self) -> str:
        """In a line, for people. Seeds may have left out different numbers of requests: with the fewest that were there."""
        there = [record["summary"]["actorllm_overall"]["requests"] for record in self.records]
        return self.scenario.describe(min(there, default=None))

    def describe_seeds(self) -> str:
        """How many there are, for people."""
        return f"{len(self.seeds)} seed{'s' if len(self.seeds) != 1 else ''}"

    @classmethod
    def of_records(
        cls, scenario: Scenario, records: Iterable[Record], stamp: dict[str, Any], targets: Sequence[float] = ()
    ) -> SweepResults:
        """From a results file: every variant and seed that is there, variants in the order of the file.

        What a label stood for before it came to stand for something else (a policy that was edited since) is left out and
        told in `notes`. Points that different code made are compared all the same; that is told there, too.
        """
        given = list(records)
        versions = {r["variant"]["label"]: r.get("version") for r in given}  # the last one of each
        now = [r for r in given if r.get("version") == versions[r["variant"]["label"]]]
        notes = []
        for label in versions:
            old = sum(r["variant"]["label"] == label for r in given) - sum(r["variant"]["label"] == label for r in now)
            if old:
                notes.append(f"{old} points of {label!r} as it was before it was changed are in the file and left out")
        codes = Counter(str(r.get("code")) for r in now)
        if len(codes) > 1:
            listed = ", ".join(f"{num} by {code}" for code, num in codes.items())
            notes.append(f"the points were made by different code ({listed}): simulate them anew to compare them")
        variants = {r["variant"]["label"]: Variant.of_results(r["variant"]) for r in now}
        found = sorted(now, key=lambda r: (r["variant"]["label"], r["rate"], r["scale"], r["seed"]))
        seeds = tuple(sorted({r["seed"] for r in found}))
        return cls(
            scenario,
            tuple(variants.values()),
            seeds,
            tuple(found),
            notes=tuple(notes),
            stamp=stamp,
            targets=tuple(sorted(targets, reverse=True)),
        )

    def labels(self) -> list[str]:
        return [variant.label for variant in self.variants]

    def points(self, label: str, rate: float, scale: float = 1.0) -> list[Record]:
        """Of every seed, in their order."""
        return self._index.get((label, rate, scale), [])

    def rates(self, label: str, scale: float = 1.0) -> list[float]:
        """Those that every seed was simulated at: with fewer, variants would be compared on other requests."""
        return list(self._rates.get((label, scale), ()))

    def incomplete(self) -> list[str]:
        """Of variants that have no rate with all seeds, so that nothing is said of them: what is missing."""
        found = []
        for label in self.labels():
            # Of each rate for itself: seeds that were simulated at different rates make no whole one.
            num_by_rate = {
                (rate, scale): len({int(record["seed"]) for record in there} & self._compared)
                for (x, rate, scale), there in self._index.items()
                if x == label
            }
            if num_by_rate and not self.rates(label):
                most = max((num for (_, scale), num in num_by_rate.items() if scale == 1), default=0)
                told = f"{label!r} has no rate with more than {most} of the {len(self._compared)} seeds of others"
                found.append(f"{told} and is not compared")
        return found

    def scales(self, label: str, rate: float) -> list[float]:
        """Those that every seed was simulated with at that rate, likewise."""
        return sorted(scale for (x, scale), rates in self._rates.items() if x == label and rate in rates)

    def band(
        self, label: str, rate: float, reading: Reading, aggregate: Aggregate = "worst", scale: float = 1.0
    ) -> Band:
        """Attainment with its band. Raises ConfigError when nothing was simulated there."""
        points = self.points(label, rate, scale)
        if not points:
            raise ConfigError(f"{label!r} was not simulated at {rate:g} requests/s with objectives x {scale:g}")
        distinct, num = self._num_distinct(points)
        return attainment_band([r["blocks"] for r in points], reading, aggregate, distinct=distinct / num)

    def _num_distinct(self, points: Sequence[Record]) -> tuple[int, int]:
        """How many different requests these points have, and how many: traces are repeated, and parts of them overlap."""
        size = self.scenario.num_requests
        windows = [point["window"] for point in points if point.get("window")]
        if len(windows) < len(points):  # of no trace
            return size * len(points), size * len(points)
        is_there = np.zeros(max(length for _, length in windows), np.bool_)
        for first, length in windows:
            is_there[(first + np.arange(min(size, length))) % length] = True
        return int(is_there.sum()), size * len(points)

    def goodput(self, label: str, rate: float, reading: Reading) -> Band:
        """Good requests per second: the share of all requests that are good, times the rate at which they were sent. That is the
        one that was asked for, unless clients wait for answers (sessions, `max_concurrency`)."""
        sent = [record.get("sent_rate") or rate for record in self.points(label, rate)]
        return self.band(label, rate, reading, "overall").scaled(float(np.mean(sent)))

    def verdict(self, label: str, rate: float, scale: float = 1.0) -> tuple[str, str]:
        """Stationarity of the seeds together, and why."""
        return together([r["stationarity"] for r in self.points(label, rate, scale)])

    def max_rate(self, label: str, target: float, reading: Reading, aggregate: Aggregate = "worst") -> MaxRate | None:
        """From every rate that was simulated; None: not even the lowest attains the target."""
        rates = self.rates(label)
        if not rates:
            return None
        value = self.attained(label, reading, aggregate)
        found = float(crossing(np.array(rates), value, target))
        if not found:
            return None
        band = band_of(found, *self.max_rate_draws(label, target, reading, aggregate))
        num_reached = int((np.minimum.accumulate(value) >= target).sum())
        verdict, _ = self.verdict(label, rates[num_reached - 1])
        return MaxRate(band, num_reached < len(rates), verdict)

    def warnings(self) -> list[str]:
        """What the runs warn of, each kind of warning once: of a policy with its label and the first run that has it."""
        first: dict[tuple[str, str], tuple[Record, str]] = {}
        num: Counter[tuple[str, str]] = Counter()
        for record in self.records:
            for text in record["warnings"]:
                # What is wrong with the workload concerns every policy; how many requests it concerns is no kind.
                whose = "" if text.startswith(("class ", LEFT_OUT, NO_PROMISES)) else record["variant"]["label"]
                kind = whose, re.sub(r"[-+]?\d[\d.,e+-]*", "#", text)
                first.setdefault(kind, (record, text))
                num[kind] += 1
        found = []
        for kind, (record, text) in first.items():
            more = f" (and {num[kind] - 1} more runs)" if num[kind] > 1 else ""
            if not kind[0]:
                found.append(f"{text}{more}")
                continue
            scale = "" if record["scale"] == 1 else f", objectives x {record['scale']:g}"
            run = f"{kind[0]} at {record['rate']:.3g} requests/s, seed {record['seed']}{scale}"
            found.append(f"{run}: {text}{more}")
        if self.records:
            one = self.records[0]
            distinct, asked = self._num_distinct(self.points(one["variant"]["label"], one["rate"], one["scale"]))
            if distinct < asked:
                found.insert(
                    0,
                    f"the seeds have {asked} requests together, {distinct} of them different: the trace has no more, or has no "
                    f"more parts of that size. Bands of attainments count the different ones; those of highest rates take "
                    f"copies for others and are too narrow. Use fewer requests or seeds, or a longer trace",
                )
        return found

    def attained(self, label: str, reading: Reading, aggregate: Aggregate) -> F64:
        """[num_rates] of all seeds together, at each of `rates`."""
        points = (self.points(label, rate) for rate in self.rates(label))
        return np.array([_pooled([record["blocks"] for record in there], reading, aggregate) for there in points])

    def max_rate_draws(self, label: str, target: float, reading: Reading, aggregate: Aggregate) -> tuple[F64, F64]:
        """[num_draws] twice: what the maximum rate is at least and at most, for each drawing of seeds and blocks."""
        return crossing_bounds(np.array(self.rates(label)), self.attainment_draws(label, reading, aggregate), target)

    def attainment_draws(self, label: str, reading: Reading, aggregate: Aggregate) -> F64:
        """[num_draws, num_rates] attainments of drawn seeds and blocks, at each of `rates`; the same ones for all variants."""
        return np.stack([self.draws_at(label, rate, reading, aggregate) for rate in self.rates(label)], axis=-1)

    def draws_at(self, label: str, rate: float, reading: Reading, aggregate: Aggregate) -> F64:
        """[num_draws] of one rate."""
        key = (label, rate, reading, aggregate)
        if key not in self._drawn:
            self._drawn[key] = drawn([r["blocks"] for r in self.points(label, rate)], reading, aggregate)
        return self._drawn[key]


def _pooled(blocks: Sequence[Record], reading: Reading, aggregate: Aggregate) -> float:
    num = np.array([b["n"] for b in blocks], float).sum(axis=(0, 1))
    good = np.array([b[reading] for b in blocks], float).sum(axis=(0, 1))
    return float(attainment_of(num, good, aggregate))


Batch = Generator[list[Point], list[Record], None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is to be simulated."""

    scenario: Scenario
    variants: Sequence[Variant]
    seeds: Sequence[int] = tuple(range(12))
    """Of fewer, bands are too narrow where requests come in bursts (`bench/slo_statistics.py`)."""

    def __post_init__(self) -> None:
        self.scenario.check_files()
        if not self.variants or not self.seeds:
            raise ConfigError("a sweep needs at least one policy and one seed")
        labels = [variant.label for variant in self.variants]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError(f"two policies of the sweep are called {label!r}")
        first: dict[str, str] = {}
        for variant in self.variants:
            other = first.setdefault(variant.digest, variant.label)
            if other != variant.label:
                raise ConfigError(
                    f"{other!r} and {variant.label!r} of the sweep are the same policy: leave one of them out"
                )

    def run(
        self,
        *,
        rates: Sequence[float] = (),
        scales: Sequence[float] = (1.0,),
        scale_rates: Sequence[float] | None = None,
        targets: Sequence[float] = (),
        readings: Sequence[Reading] = READINGS,
        aggregates: Sequence[Aggregate] = AGGREGATES,
        ladder: Ladder | None = None,
        brackets_bands: bool = False,
        store: str | Path | None = None,
        num_processes: int | None = None,
        on_progress: Progress | None = None,
    ) -> SweepResults:
        """The grid rates x scales, and searches for the highest rate at every target, reading and aggregate.

        scales other than 1 are simulated at scale_rates (None: at all rates). ladder: where searches begin and how fine
        they are; None: at the middle one of the rates. brackets_bands: searches go on, further down and up, until the bands of
        the highest rates end between rates that were simulated, or MAX_WIDENINGS times. store: a file that is added to; what
        it has of these points is not simulated again. num_processes: None: as many as there are cores; 0: none but this one.

        A point that fails (a policy that raises) ends the other points of its variant, which are left out, and is told in
        `failures`. Ctrl-C: everything that is done is in the store.
        """
        for target in targets:
            if not 0 < target <= 1:
                raise ConfigError(f"target={target!r} must be a share between 0 and 1, such as 0.99")
        if targets and ladder is None:
            if not rates:
                raise ConfigError("a search needs a ladder, or rates to begin from")
            ladder = Ladder(sorted(rates)[len(rates) // 2])
        wanted = [(target, r, w) for target in sorted(targets) for r in readings for w in aggregates]
        jobs: list[tuple[Variant, Batch]] = []
        for variant in self.variants:
            grid = self._grid(variant, rates, scales, scale_rates)
            if grid:
                jobs.append((variant, _all_at_once(grid)))
            if ladder is not None and wanted:
                jobs.append((variant, self._searches(variant, ladder, wanted, MAX_WIDENINGS if brackets_bands else 0)))
        with ExitStack() as stack:
            kept = stack.enter_context(Store(store))
            notes = kept.begin(self.scenario, targets)
            pool = stack.enter_context(Pool(num_processes))
            records, failures = _drive(jobs, kept, pool, on_progress)
        ordered = sorted(records, key=lambda r: (r["variant"]["label"], r["rate"], r["scale"], r["seed"]))
        return SweepResults(
            self.scenario,
            tuple(self.variants),
            tuple(self.seeds),
            tuple(ordered),
            tuple(failures),
            tuple(notes),
            targets=tuple(sorted(set(targets), reverse=True)),
        )

    def _point(self, variant: Variant, rate: float, seed: int, scale: float = 1.0) -> Point:
        return Point(scenario=self.scenario, variant=variant, rate=rate, seed=seed, scale=scale)

    def _grid(
        self,
        variant: Variant,
        rates: Sequence[float],
        scales: Sequence[float],
        scale_rates: Sequence[float] | None,
    ) -> list[Point]:
        pairs = [(rate, 1.0) for rate in rates]
        pairs += [(rate, s) for rate in (rates if scale_rates is None else scale_rates) for s in scales if s != 1]
        return [self._point(variant, rate, seed, scale) for rate, scale in pairs for seed in self.seeds]

    def _searches(
        self, variant: Variant, ladder: Ladder, wanted: Sequence[tuple[float, Reading, Aggregate]], num_widenings: int
    ) -> Batch:
        """One after the other, each with what the ones before it have found."""
        blocks: dict[int, list[Any]] = {}

        def simulated(rung: int) -> Batch:
            if rung not in blocks:
                points = [self._point(variant, ladder.rate(rung), seed) for seed in self.seeds]
                blocks[rung] = [record["blocks"] for record in (yield points)]

        for target, reading, aggregate in wanted:
            known = {rung: _pooled(found, reading, aggregate) for rung, found in blocks.items()}
            steps = search(ladder, target, known)
            try:
                rung = next(steps)
                while True:
                    yield from simulated(rung)
                    known[rung] = _pooled(blocks[rung], reading, aggregate)
                    rung = steps.send(known[rung])
            except StopIteration:
                pass
            for _ in range(num_widenings):
                further = _beyond(ladder, blocks, target, reading, aggregate)
                for rung in further:
                    yield from simulated(rung)
                if not further:
                    break


def _beyond(
    ladder: Ladder, blocks: Mapping[int, list[Any]], target: float, reading: Reading, aggregate: Aggregate
) -> list[int]:
    """The rungs next below and above those simulated at which the band of the highest rate may end; none: it is bracketed."""
    rungs = sorted(blocks)
    rates = np.array([ladder.rate(rung) for rung in rungs])
    value = float(crossing(rates, np.array([_pooled(blocks[rung], reading, aggregate) for rung in rungs]), target))
    if not value:
        return []  # no rate is high enough to have a band
    draws = np.stack([drawn(blocks[rung], reading, aggregate) for rung in rungs], axis=-1)
    band = band_of(value, *crossing_bounds(rates, draws, target))
    found = [max(rungs[0] - FIRST_STRIDE, -ladder.last)] if band.low_is_open else []
    found += [min(rungs[-1] + FIRST_STRIDE, ladder.last)] if band.high_is_open else []
    return [rung for rung in found if rung not in blocks]


def _all_at_once(points: list[Point]) -> Batch:
    yield points


class _Job:
    """A generator of batches, and what it waits for."""

    def __init__(self, variant: Variant, batches: Batch) -> None:
        self.variant = variant
        self.batches = batches
        self.wanted: list[Point] = []
        self.missing: set[str] = set()


def _drive(
    jobs: Sequence[tuple[Variant, Batch]], store: Store, pool: Pool, on_progress: Progress | None
) -> tuple[list[Record], list[PointError]]:
    """Run generators side by side; their points go through the pool, each of them once."""
    records: dict[str, Record] = {}
    failures: list[PointError] = []
    failed: set[str] = set()
    under_way: set[str] = set()
    waiting: list[_Job] = []
    num_done = num_known = 0

    def go_on(job: _Job, got: list[Record] | None) -> None:
        """Hand a job what it waited for, until it wants what is not there."""
        nonlocal num_known
        while True:
            try:
                job.wanted = next(job.batches) if got is None else job.batches.send(got)
            except StopIteration:
                return
            job.missing = set()
            for point in job.wanted:
                key = point.key
                if key in records:
                    continue
                if key in store.records:
                    records[key] = _labelled(store.records[key], point)
                    continue
                job.missing.add(key)
                if key not in under_way:
                    under_way.add(key)
                    num_known += 1
                    pool.submit(point)
            if job.missing:
                waiting.append(job)
                return
            got = [records[point.key] for point in job.wanted]

    for variant, batches in jobs:
        go_on(_Job(variant, batches), None)
    while under_way:
        point, found = pool.next_done()
        key = point.key
        under_way.discard(key)
        num_done += 1
        if isinstance(found, PointError):
            if point.variant.label not in failed:
                failed.add(point.variant.label)
                failures.append(found)
        else:
            records[key] = found
            store.add(found)
        if on_progress is not None:
            on_progress(num_done, num_known, point)
        for job in list(waiting):
            job.missing.discard(key)
            if job.variant.label in failed:
                waiting.remove(job)
                job.batches.close()
            elif not job.missing:
                waiting.remove(job)
                go_on(job, [records[point.key] for point in job.wanted])
    return list(records.values()), failures


def _labelled(record: Record, point: Point) -> Record:
    """A label is no part of the key: what is found under another one is called as it is called now."""
    return record | {"variant": point.variant.to_dict()}


def ratio_band(
    one: SweepResults, label: str, other: str, target: float, reading: Reading, aggregate: Aggregate = "worst"
) -> Band | None:
    """How many times the maximum rate of `other` that of `label` is, with the draws of the one paired with the other's."""
    mine, theirs = (one.max_rate(name, target, reading, aggregate) for name in (label, other))
    if mine is None or theirs is None:
        return None
    least, most = one.max_rate_draws(label, target, reading, aggregate)
    other_least, other_most = one.max_rate_draws(other, target, reading, aggregate)
    with np.errstate(divide="ignore"):
        return band_of(mine.rate / theirs.rate, least / other_most, most / other_least)
