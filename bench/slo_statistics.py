"""How often do the laboratory's bands hold the truth, and how often are its findings on backlogs true?

    python bench/slo_statistics.py [--json FILE] [--trials N]

A queue is simulated whose truth is known from all trials together: one server, first come, first served, lognormal service of a
second in the mean, two classes with a promise on the time in the system (`PROMISES`). Its requests miss in clusters, as those
of an engine do. Each trial is a sweep: for every number of seeds as many runs of 2,000 requests at each utilization, with the
same requests at all of them, judged by the code that judges sweeps.

Nominal is 95 %. "attainment" is the band of the worst class at the utilizations at which 50 to 99.5 % are good. "highest rate" is
that of `SweepResults.max_rate` at 99 and 90 %, "ratio" that of `sustained_ratio` to the same queue with a server that is a fifth
faster. A band that is open at an end holds everything beyond that end. Where even the lowest rate fails, the highest rate is told
to be below it; that counts as wrong, as the truth is above. The target is 90 % of nominal with the default number of seeds of
`actorllm sweep`.

"false leads": how often the report says that one of two serves more that serve the same: the same arrivals, and services that are
drawn anew. Nominal is 5 %.

Backlogs: how many runs are called growing, and how many stationary, by utilization and arrivals. Below 1 a growing one is a false
alarm, above 1 a stationary one is wrong; the rest is told as too short to say. What a sweep tells is of all seeds of a rate
together, so points of the default number of seeds are counted, too. `bursty` has on and off phases of a minute at one request
per second.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import environment, print_table, versions, write_json

from actorllm.cli.laboratory import sweep
from actorllm.messages import F64
from actorllm.slo.experiments import Scenario, SweepResults, Variant, sustained, sustained_ratio
from actorllm.slo.experiments.bands import CONFIDENCE, Band, attainment_band, crossing
from actorllm.slo.experiments.comparison import standing
from actorllm.slo.experiments.record import NUM_BLOCKS
from actorllm.slo.experiments.stationarity import judge, together
from actorllm.slo.timeline import timeline_of_streams
from actorllm.slo.workload import bursty_arrivals, gamma_arrivals, poisson_arrivals, seed_stream

NUM_REQUESTS = 2000
NUM_SEEDS = (2, 3, 5, 8, 12)
UTILIZATIONS = tuple(round(0.97 * 0.95**rung, 4) for rung in reversed(range(31)))
"""A ladder, as searches have it: between rates far apart a highest rate lies on a straight line, which is not the truth."""
TARGETS = (0.99, 0.9)
PROMISES = {"poisson": (10.0, 40.0), "gamma:3": (20.0, 80.0), "bursty": (60.0, 240.0)}
"""Seconds in the system, of both classes: such that the targets are attained at some of the utilizations."""
FASTER = 1.2
"""How many times as fast the server of the other variant is."""
ARRIVALS = {
    "poisson": lambda num, seed: poisson_arrivals(num, 1.0, seed),
    "gamma:3": lambda num, seed: gamma_arrivals(num, 1.0, 3.0, seed),
    "bursty": lambda num, seed: bursty_arrivals(num, 1.0, seed=seed),
}
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.5)
"""Utilizations at which backlogs are judged."""
BANDS = ("attainment", "highest rate", "ratio")
LEADS = "false leads"
GOAL = 0.9 * CONFIDENCE


def served(arrival: F64, service: F64) -> F64:
    """When each request of a queue with one server ends (Lindley)."""
    total = np.cumsum(service)
    found: F64 = total + np.maximum.accumulate(arrival - (total - service))
    return found


def runs(arrivals: str, seed: int, speed: float = 1.0, service: str = "service") -> list[dict[str, list[list[int]]]]:
    """The counts of one seed at each utilization, as a results file has them. service: the stream that it is drawn from."""
    arrival = ARRIVALS[arrivals](NUM_REQUESTS, seed)
    arrival = arrival * (NUM_REQUESTS / (arrival[-1] or 1.0))
    took = seed_stream(seed, service).lognormal(-0.5, 1.0, NUM_REQUESTS) / speed
    kinds = seed_stream(seed, "kinds").integers(0, 2, NUM_REQUESTS)
    promised = np.array(PROMISES[arrivals])[kinds]
    cell = np.arange(NUM_REQUESTS) * NUM_BLOCKS // NUM_REQUESTS * 2 + kinds

    def count(cells: NDArray[np.int64]) -> list[list[int]]:
        counts: list[list[int]] = np.bincount(cells, minlength=2 * NUM_BLOCKS).reshape(NUM_BLOCKS, 2).tolist()
        return counts

    num, found = count(cell), []
    for utilization in UTILIZATIONS:
        at = arrival / utilization
        is_good = served(at, took) - at <= promised
        good = count(cell[is_good])
        found.append({"n": num, "deadline": good, "tpot": good})
    return found


def sweep_of(blocks: dict[str, Sequence[Sequence[dict[str, Any]]]]) -> SweepResults:
    """Of every variant, for each seed, its counts at each utilization."""
    records = [
        {
            "variant": {"label": label},
            "rate": utilization,
            "scale": 1.0,
            "seed": seed,
            "blocks": counts,
            "stationarity": {"verdict": "stationary", "message": ""},
            "warnings": [],
        }
        for label, by_seed in blocks.items()
        for seed, points in enumerate(by_seed)
        for utilization, counts in zip(UTILIZATIONS, points, strict=True)
    ]
    variants = tuple(Variant.parse("fcfs", label) for label in blocks)
    num_seeds = len(next(iter(blocks.values())))
    scenario = Scenario(workload="synthetic", num_requests=NUM_REQUESTS)
    return SweepResults(scenario, variants, tuple(range(num_seeds)), tuple(records))


def holds(band: Band, truth: float) -> bool:
    return (band.low_is_open or band.low <= truth) and (band.high_is_open or truth <= band.high)


def coverage(arrivals: str, num_trials: int) -> list[dict[str, Any]]:
    """A row for each number of seeds."""
    every: dict[str, list[Any]] = {"plain": [], "fast": [], "twin": []}
    for seed in range(num_trials * max(NUM_SEEDS)):
        every["plain"].append(runs(arrivals, seed))
        every["fast"].append(runs(arrivals, seed, FASTER))
        every["twin"].append(runs(arrivals, seed, service="service of a twin"))
    truth = sweep_of(every)
    tried = np.array(UTILIZATIONS)
    attained = {name: truth.attained(name, "deadline", "worst") for name in every}
    rates = {(x, t): float(crossing(tried, attained[x], t)) for x in every for t in TARGETS}
    shares = attained["plain"]
    rows = []
    for num_seeds in NUM_SEEDS:
        held: dict[str, list[bool]] = {name: [] for name in (*BANDS, LEADS)}
        for trial in range(num_trials):
            seeds = slice(trial * max(NUM_SEEDS), trial * max(NUM_SEEDS) + num_seeds)
            results = sweep_of({name: found[seeds] for name, found in every.items()})
            for number, share in enumerate(shares.tolist()):
                if 0.5 <= share <= 0.995:
                    band = attainment_band([found[number] for found in every["plain"][seeds]], "deadline", "worst")
                    held["attainment"].append(band.low <= share <= band.high)
            for target in TARGETS:
                plain, fast = (rates[name, target] for name in ("plain", "fast"))
                if not plain or not fast:
                    continue  # the truth itself is below the lowest rate
                one = results.max_rate("plain", target, "deadline")
                held["highest rate"].append(one is not None and holds(one.band, plain))
                mine, theirs = (sustained(results, name, target, "deadline") for name in ("fast", "plain"))
                ratio = None if mine is None or theirs is None else sustained_ratio(mine, theirs)
                held["ratio"] += [] if ratio is None else [holds(ratio, fast / plain)]
                found = standing(results, ("plain", "twin"), target, "deadline")
                held[LEADS].append(found is not None and not found.equal)
        rows.append(
            {"arrivals": arrivals, "seeds": num_seeds}
            | {name: float(np.mean(found)) if found else None for name, found in held.items()}
            | {"trials": num_trials}
        )
    return rows


def judged(rows: Sequence[dict[str, Any]], default: int) -> list[dict[str, Any]]:
    """For people; the target is that of the default number of seeds."""
    found = []
    for row in rows:
        is_default = row["seeds"] == default
        shares = {name: row[name] for name in (*BANDS, LEADS)}
        is_met = [share is None or share >= GOAL for name, share in shares.items() if name in BANDS]
        is_met.append(shares[LEADS] is None or shares[LEADS] <= 1 - GOAL)
        found.append(
            row
            | {"seeds": f"{default} (default)" if is_default else str(row["seeds"])}
            | {name: "—" if share is None else f"{share:.1%}" for name, share in shares.items()}
            | {"target": f"≥ {GOAL:.1%}; false leads ≤ {1 - GOAL:.1%}" if is_default else "—"}
            | {"met": all(is_met) if is_default else "—"}
        )
    return found


def default_seeds() -> int:
    found: int = inspect.signature(sweep).parameters["seeds"].default
    return found


def growth(arrivals: str, num_points: int, num_seeds: int) -> list[dict[str, Any]]:
    """How many runs are called growing, and how many stationary, by utilization; and how many points of so many runs."""
    lengths = np.full(NUM_REQUESTS, 10, np.int32)
    empty = timeline_of_streams(np.zeros(NUM_REQUESTS), lengths, [np.zeros(1)] * NUM_REQUESTS)
    of_runs: dict[str, str] = {}
    of_points: dict[str, str] = {}
    for load in LOADS:
        found = []
        for seed in range(num_points * num_seeds):
            arrival = ARRIVALS[arrivals](NUM_REQUESTS, seed)
            arrival = arrival * (NUM_REQUESTS / arrival[-1]) / load
            service = seed_stream(seed, "service").lognormal(-0.5, 1.0, NUM_REQUESTS)
            found.append(judge(replace(empty, arrival=arrival, end=served(arrival, service))).to_dict())
        points = [together(found[at : at + num_seeds])[0] for at in range(0, len(found), num_seeds)]
        of_runs[f"at {load:g}"] = shares_of([one["verdict"] for one in found])
        of_points[f"at {load:g}"] = shares_of(points)
    return [
        {"growing / stationary": f"{arrivals}, one run", **of_runs, "number": num_points * num_seeds},
        {"growing / stationary": f"{arrivals}, {num_seeds} runs together", **of_points, "number": num_points},
    ]


def shares_of(verdicts: Sequence[str]) -> str:
    growing, stationary = (verdicts.count(verdict) / len(verdicts) for verdict in ("growing", "stationary"))
    return f"{growing:.0%} / {stationary:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--trials", type=int, default=200)
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    measured = [row for arrivals in ARRIVALS for row in coverage(arrivals, arguments.trials)]
    rows = judged(measured, default_seeds())
    print_table("how many bands hold the truth (nominal 95 %)", rows)
    points = max(1, arguments.trials // 2)
    grown = [row for arrivals in ARRIVALS for row in growth(arrivals, points, default_seeds())]
    print_table("how many runs, and points of several, are called growing / stationary, by utilization", grown)
    if arguments.json:
        write_json(
            arguments.json,
            {
                "bench": "slo_statistics",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {"requests": NUM_REQUESTS, "promises, s": PROMISES, "versions": versions()},
                "rows": rows,
                "growth": grown,
            },
        )


if __name__ == "__main__":
    main()
