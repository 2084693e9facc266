"""How often do the laboratory's bands hold the truth, and how often are its findings on backlogs true?

    python bench/slo_statistics.py [--json FILE] [--trials N]

A queue is simulated whose truth is known from all trials together: one server, first come, first served, lognormal service of a
second in the mean, two classes with a promise on the time in the system (`PROMISES`). Its requests miss in clusters, as those
of an engine do. Each trial is a sweep: for every number of seeds as many runs of 2,000 requests at each utilization, with the
same requests at all of them, judged by the code that judges sweeps.

Nominal is 95 %. "attainment" is the band of the worst class at the utilizations at which 50 to 99.5 % are good. "highest rate" is
that of `SweepResults.max_rate` at 99 and 90 %, "ratio" that of `ratio_band` to the same queue with a server that is a fifth
faster. A band that is open at an end holds everything beyond that end. The target is 90 % of nominal with the default number of
seeds of `actorllm sweep`.

Backlogs: how many runs are called growing, and how many stationary, by utilization and arrivals. Below 1 a growing one is a false
alarm, above 1 a stationary one is wrong; the rest is told as too short to say. `bursty` has on and off phases of a minute at one
request per second.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from report import environment, print_table, versions, write_json

from actorllm.cli.laboratory import sweep
from actorllm.messages import F64
from actorllm.slo.experiments import Scenario, SweepResults, Variant, ratio_band
from actorllm.slo.experiments.bands import CONFIDENCE, Band, attainment_band
from actorllm.slo.experiments.record import NUM_BLOCKS
from actorllm.slo.experiments.stationarity import judge
from actorllm.slo.timeline import timeline_of_streams
from actorllm.slo.workload import bursty_arrivals, gamma_arrivals, poisson_arrivals, seed_stream

NUM_REQUESTS = 2000
NUM_SEEDS = (2, 3, 5, 8, 12)
UTILIZATIONS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
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
GOAL = 0.9 * CONFIDENCE


def served(arrival: F64, service: F64) -> F64:
    """When each request of a queue with one server ends (Lindley)."""
    total = np.cumsum(service)
    found: F64 = total + np.maximum.accumulate(arrival - (total - service))
    return found


def runs(arrivals: str, seed: int, speed: float = 1.0) -> list[dict[str, list[list[int]]]]:
    """The counts of one seed at each utilization, as a results file has them."""
    arrival = ARRIVALS[arrivals](NUM_REQUESTS, seed)
    arrival = arrival * (NUM_REQUESTS / (arrival[-1] or 1.0))
    rng = seed_stream(seed, "service")
    service = rng.lognormal(-0.5, 1.0, NUM_REQUESTS) / speed
    kinds = rng.integers(0, 2, NUM_REQUESTS)
    promised = np.array(PROMISES[arrivals])[kinds]
    cell = np.arange(NUM_REQUESTS) * NUM_BLOCKS // NUM_REQUESTS * 2 + kinds
    found = []
    for utilization in UTILIZATIONS:
        at = arrival / utilization
        is_good = served(at, service) - at <= promised
        counts = [
            np.bincount(cell[rows], minlength=2 * NUM_BLOCKS).reshape(NUM_BLOCKS, 2).tolist()
            for rows in (np.ones(NUM_REQUESTS, np.bool_), is_good)
        ]
        found.append({"n": counts[0], "deadline": counts[1], "tpot": counts[1]})
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


def holds(band: Band | None, truth: float) -> bool | None:
    """None: there is no band, because not even the lowest rate that was tried attains the target."""
    if band is None:
        return None
    return (band.low_is_open or band.low <= truth) and (band.high_is_open or truth <= band.high)


def coverage(arrivals: str, num_trials: int) -> list[dict[str, Any]]:
    """A row for each number of seeds."""
    every = {name: [] for name in ("plain", "fast")}
    for seed in range(num_trials * max(NUM_SEEDS)):
        every["plain"].append(runs(arrivals, seed))
        every["fast"].append(runs(arrivals, seed, FASTER))
    truth = sweep_of(every)
    shares = truth.attained("plain", "deadline", "worst")
    rates = {(x, t): truth.max_rate(x, t, "deadline") for x in every for t in TARGETS}
    rows = []
    for num_seeds in NUM_SEEDS:
        held: dict[str, list[bool]] = {name: [] for name in BANDS}
        for trial in range(num_trials):
            mine = slice(trial * max(NUM_SEEDS), trial * max(NUM_SEEDS) + num_seeds)
            results = sweep_of({name: found[mine] for name, found in every.items()})
            for number, share in enumerate(shares.tolist()):
                if 0.5 <= share <= 0.995:
                    band = attainment_band([found[number] for found in every["plain"][mine]], "deadline", "worst")
                    held["attainment"].append(band.low <= share <= band.high)
            for target in TARGETS:
                plain, fast = (rates[name, target] for name in ("plain", "fast"))
                if plain is None or fast is None:
                    continue  # the truth itself is below the lowest rate
                one = results.max_rate("plain", target, "deadline")
                is_held = holds(None if one is None else one.band, plain.rate)
                held["highest rate"] += [] if is_held is None else [is_held]
                band_of_both = ratio_band(results, "fast", "plain", target, "deadline")
                is_held = holds(band_of_both, fast.rate / plain.rate)
                held["ratio"] += [] if is_held is None else [is_held]
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
        shares = {name: row[name] for name in BANDS}
        found.append(
            row
            | {"seeds": f"{default} (default)" if is_default else str(row["seeds"])}
            | {name: "—" if share is None else f"{share:.1%}" for name, share in shares.items()}
            | {"target": f"≥ {GOAL:.1%}" if is_default else "—"}
            | {"met": all(share is None or share >= GOAL for share in shares.values()) if is_default else "—"}
        )
    return found


def default_seeds() -> int:
    found: int = inspect.signature(sweep).parameters["seeds"].default
    return found


def growth(arrivals: str, num_runs: int) -> dict[str, Any]:
    """How many runs are called growing, and how many stationary, by utilization."""
    shares: dict[str, str] = {}
    for load in LOADS:
        verdicts: Counter[str] = Counter()
        for seed in range(num_runs):
            arrival = ARRIVALS[arrivals](NUM_REQUESTS, seed)
            arrival = arrival * (NUM_REQUESTS / arrival[-1]) / load
            service = seed_stream(seed, "service").lognormal(-0.5, 1.0, NUM_REQUESTS)
            ends = served(arrival, service)
            timeline = timeline_of_streams(arrival, np.full(NUM_REQUESTS, 10, np.int32), list(ends[:, None]))
            verdicts[judge(timeline).verdict] += 1
        shares[f"at {load:g}"] = f"{verdicts['growing'] / num_runs:.0%} / {verdicts['stationary'] / num_runs:.0%}"
    return {"growing / stationary": arrivals, **shares, "runs each": num_runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--trials", type=int, default=200)
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    measured = [row for arrivals in ARRIVALS for row in coverage(arrivals, arguments.trials)]
    rows = judged(measured, default_seeds())
    print_table("how many bands hold the truth (nominal 95 %)", rows)
    grown = [growth(arrivals, arguments.trials) for arrivals in ARRIVALS]
    print_table("how many runs are called growing / stationary, by utilization", grown)
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
