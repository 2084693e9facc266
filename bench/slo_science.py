"""Which policy serves the highest rate within the objectives? Latency-sensitive and best-effort requests, real arrivals.

    python bench/slo_science.py --trace conv=CONV.csv --trace code=CODE.csv [--json FILE] [--store FILE] [--only LABEL ...]
                                [--processes N] [--fairness] [--claims] [--strict]
    python bench/slo_science.py --derive --json FILE

Simulated: Llama-3-8B on one A100 (published step times), 25,000 KV blocks of 16 tokens. Half of the requests are latency
sensitive (first token within 0.5 s + 1 s for every 4,000 prompt tokens, then one every 50 ms), half best effort (end within
120 s). Lengths and arrivals of the Azure LLM inference traces of 2023, stretched to the rate; every seed has a part of the
trace of its own and draws other classes. A rate counts when 99 % (90 %) of the class that is worst off are served within
their objective, with the same requests for all policies; bands are bootstrapped over seeds and blocks of requests. Deadline:
token i is due at arrival + ttft + i * tpot. TPOT: the mean gap of a request is at most tpot. Rates are bisected for the
deadline reading, and simulated until its bands end between them; the other one is counted at the same rates. "< 1.83" is
somewhere below the lowest of them, "> 3.42" somewhere above the highest.

A ratio is of rates at which no backlog grows. A target is met if the low end of the band of the ratio is; of a policy that
fails at the lowest rate that was tried, that rate is taken.

A claim of a paper is held against the same requests: by how much one policy beats another there, and here. The baselines of
claims pack strictly, as those of the papers do (Sarathi-Serve); the built-in `fcfs` lets short prompts pass a long one.

Fairness is another question, asked of the first trace only: four tenants, one of which sends 70 % of the requests, at a rate
beyond what the engine can take.

--store keeps every point, so that a run may be continued: FILE.conv, FILE.code. --only runs some of the policies, by their
label: they alone are written. --fairness, --claims and --strict: only that question; what --json had of the others is kept.
--strict holds the policies of CANDIDATES against the best chunk of a fcfs that packs strictly.

Everything but the rates follows from them. With the --store of a run that is done, the same command simulates nothing and makes
all ratios and their bands anew. --derive needs no store. It makes anew what follows from ratios as --json has them: whether a
target is met, and a claim reproduced.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from report import command, environment, print_table, versions, write_json

from actorllm.slo.experiments import (
    Band,
    Ladder,
    Point,
    Scenario,
    Sustained,
    Sweep,
    SweepResults,
    Variant,
    sustained,
    sustained_ratio,
)
from actorllm.slo.experiments.point import code_digest
from actorllm.slo.fairness import Fairness, fairness_of
from actorllm.slo.simulator import EngineShape
from actorllm.slo.traces import load_trace
from actorllm.types.objective import Reading

MIX = "ls:0.5:ttft=0.5+p/4000,tpot=0.05,priority=0 be:0.5:e2e=120,priority=1"
SHAPE = EngineShape(num_blocks=25_000, block_size=16, max_model_len=16_384, enable_prefix_caching=False)
CHUNKS = (256, 512, 1024, 2048, 4096)
FCFS = [(f"fcfs {chunk}", f"fcfs@{chunk}") for chunk in CHUNKS]
STRICT = [
    *((f"strict fcfs {chunk}", f"fcfs,strict=on@{chunk}") for chunk in CHUNKS),
    ("strict edf 512", "edf,strict=on@512"),
]
"""With the packing of Sarathi-Serve: no prompt passes another."""
OTHERS = [
    ("priority 512", "priority@512"),
    ("priority 2048", "priority@2048"),
    ("srpf 2048", "srpf@2048"),
    ("hrrn 2048", "hrrn@2048"),
    ("edf 512", "edf@512"),
    ("edf 2048", "edf@2048"),
    ("fairbatch", "fairbatch,step_time=model@2048"),
    ("qoserve as published", "qoserve,step_time=model@2048"),
    ("qoserve, alpha 0.0005", "qoserve,alpha=0.0005,step_time=model@2048"),
    ("qoserve, anchor first", "qoserve,alpha=0.0005,anchor=first,step_time=model@2048"),
    ("cohost", "cohost,step_time=model@2048"),
    ("cohost, anchor slo", "cohost,anchor=slo,step_time=model@2048"),
    ("cohost, anchor slo, learned", "cohost,anchor=slo@2048"),
    (
        "cohost, tuned",
        "cohost,anchor=slo,strict=on,relegates=off,turns=50,yields=0.8,safety=1.05,step_time=model@2048",
    ),
]
VARIANTS = dict(FCFS + STRICT + OTHERS)
"""Label and variant. Chunks of those with a dynamic one are what a step may hold at most."""
STARTS = {"conv": 2.5, "code": 0.4}
TARGETS = {"conv": (0.99, 0.9), "code": (0.9,)}
"""On code, with its bursts, 99 % is out of reach of every policy at any rate worth running at."""
TENANTS = (0.7, 0.1, 0.1, 0.1)
FAIRNESS_RATE = 4.5
KEPT = ("fairness", "fairness_command", "strict", "strict_command")
READINGS: tuple[Reading, ...] = ("deadline", "tpot")
GOALS = {"conv": (0.99, 1.7), "code": (0.9, 3.0)}
"""At which attainment the best policy is to have how many times the rate of the best fcfs chunk, in the deadline reading."""
STRICT_GOALS = {"conv": (0.99, 2.0), "code": (0.9, 5.0)}
"""The same against the best chunk of strict fcfs."""
CANDIDATES = ("cohost", "cohost, anchor slo", "cohost, tuned", "qoserve as published")
CLAIMS = [
    (
        "QoServe: 1.5 to 2.4 times Sarathi's fcfs",
        "qoserve as published",
        ("strict fcfs 256", "strict fcfs 512"),
        (1.5, 2.4),
    ),
    ("QoServe: 1.2 to 1.4 times edf", "qoserve as published", ("strict edf 512",), (1.2, 1.4)),
    ("FairBatching: 1.2 times Sarathi's fcfs", "fairbatch", ("strict fcfs 256", "strict fcfs 512"), (1.2, math.inf)),
]
"""What was published (ASPLOS 2026; arXiv 2510.14392), for chunks of 256 to 512 tokens: which policy, compared with the best
of which others, and how many times the rate. The others pack strictly, as in the papers."""
CLAIMED = tuple(dict.fromkeys(label for _, mine, rivals, _ in CLAIMS for label in (mine, *rivals)))


def num_requests(trace: str, arguments: argparse.Namespace) -> int:
    """For each seed: as many as leave every seed a part of the trace of its own."""
    return min(arguments.requests, len(load_trace(trace).workload) // arguments.seeds)


def sweep(name: str, trace: str, labels: list[str], arguments: argparse.Namespace) -> SweepResults:
    scenario = Scenario(workload=trace, num_requests=num_requests(trace, arguments), mix=MIX, shape=SHAPE)
    variants = [Variant.parse(VARIANTS[label], label) for label in labels]
    return Sweep(scenario, variants, seeds=range(arguments.seeds)).run(
        targets=TARGETS.get(name, (0.99, 0.9)),
        readings=("deadline",),
        aggregates=("worst",),
        ladder=Ladder(STARTS.get(name, 1.0), step=0.04),
        brackets_bands=True,
        store=arguments.store and f"{arguments.store}.{name}",
        num_processes=arguments.processes,
        on_progress=lambda done, known, point: print(f"{name}: {done}/{known} {point}", flush=True),
    )


def told(band: Band) -> str:
    return f"{band.value:.2f} ({' to '.join(band.ends())})"


def cell(results: SweepResults, label: str, target: float, reading: Reading) -> str:
    found = results.max_rate(label, target, reading)
    if found is None:
        return f"< {min(results.rates(label)):.2f}" if results.rates(label) else "failed"
    more = "" if found.is_bounded else "at least "
    warning = "" if found.verdict == "stationary" else f", {found.verdict}"
    return f"{more}{told(found.band)}{warning}"


def rows_of(name: str, results: SweepResults) -> list[dict[str, Any]]:
    return [
        {"trace": name, "policy": label}
        | {
            f"{target:.0%} {reading}": cell(results, label, target, reading)
            if target in TARGETS.get(name, (0.99, 0.9))
            else "—"
            for reading in READINGS
            for target in (0.99, 0.9)
        }
        for label in results.labels()
    ]


def gap_of(runs: list[Fairness]) -> str:
    """The mean of those runs in which tenants waited beside each other throughout a window."""
    gaps = [fair.gap for fair in runs if fair.num_windows]
    return f"{statistics.mean(gaps) / 1000:.0f}k tokens" if gaps else "not tested"


def fairness_rows(trace: str, num: int, seeds: int) -> list[dict[str, Any]]:
    """Means over the seeds."""
    scenario = Scenario(workload=trace, num_requests=num, mix=MIX, shape=SHAPE, tenants=TENANTS)
    rows: list[dict[str, Any]] = []
    for text in ("fcfs@512", "vtc@512", "edf@512"):
        found, kept = [], []
        for seed in range(seeds):
            run = Point(scenario=scenario, variant=Variant.parse(text), rate=FAIRNESS_RATE, seed=seed).run()
            fair = fairness_of(run.timeline, run.workload)
            assert fair is not None
            found.append(fair)
            kept.append(run.evaluate().overall.attainment["deadline"])
        heavy = statistics.mean(fair.queue_p99_s[0] for fair in found)
        light = statistics.mean(max(fair.queue_p99_s[1:]) for fair in found)
        rows.append(
            {
                "policy": text.replace("@", " "),
                "requests/s": FAIRNESS_RATE,
                "queue p99 of who sends 70 %, s": round(heavy, 1),
                "of the worst of the others, s": round(light, 1),
                "largest gap in service within a window": gap_of(found),
                "all requests in time, deadline": f"{statistics.mean(kept):.0%}",
            }
        )
    return rows


def found_of(results: SweepResults, labels: list[str], target: float, reading: Reading) -> list[Sustained]:
    """Rates at which the backlog grows do not count: how high they are depends on the length of the run."""
    return [one for label in labels if (one := sustained(results, label, target, reading)) is not None]


def best(results: SweepResults, labels: list[str], target: float, reading: Reading) -> str:
    """The policy of the highest rate that is known."""
    return max(found_of(results, labels, target, reading), key=lambda one: one.least).label


def rival(results: SweepResults, labels: list[str], target: float, reading: Reading) -> str:
    """The best of what others are compared with. One that fails at the lowest rate that was tried may sustain nearly that."""
    found = found_of(results, labels, target, reading)
    return max(found, key=lambda one: one.as_rival).label


class Ratio(NamedTuple):
    """How many times the rate of one policy that of another is; value 0: it is not known."""

    text: str
    value: float
    low: float
    high: float


def ratio(results: SweepResults, label: str, other: str, target: float, reading: Reading) -> Ratio:
    mine, theirs = found_of(results, [label, other], target, reading)
    band = sustained_ratio(mine, theirs)
    if band is None:
        return Ratio("—", 0.0, 0.0, math.inf)
    text = told(band) if theirs.is_known else f"> {band.value:.2f} (> {band.low:.2f})"
    if mine.grows_from is not None or theirs.grows_from is not None:
        text += ", growing rates left out"
    return Ratio(text, band.value, band.low, math.inf if band.high_is_open else band.high)


def is_met(found: Ratio, goal: float) -> bool | str:
    """The best of several on the same requests looks better than it is. So the low end of the band has to reach the goal."""
    return True if found.low >= goal else "within the band" if found.high >= goal else False


def ratios_of(name: str, results: SweepResults) -> list[dict[str, Any]]:
    """Of the best policy to the best fcfs chunk, and to the best chunk of static priorities."""
    labels = [label for label in results.labels() if results.rates(label)]
    others = [label for label, _ in OTHERS if label in labels]  # the baselines are no candidates
    rows: list[dict[str, Any]] = []
    if not others:
        return rows
    for reading in READINGS:
        for target in TARGETS.get(name, (0.99, 0.9)):
            winner = best(results, others, target, reading)
            for kind in ("strict fcfs", "fcfs", "priority", "edf"):
                tuned = [label for label in labels if label.startswith(f"{kind} ")]
                if not tuned:
                    continue
                other = rival(results, tuned, target, reading)
                found = ratio(results, winner, other, target, reading)
                goal = GOALS.get(name, (0.0, 0.0))
                counts = kind == "fcfs" and reading == "deadline" and goal[0] == target
                rows.append(
                    {
                        "trace": name,
                        "attainment": f"{target:.0%} {reading}",
                        "best policy": winner,
                        "compared with the best": other,
                        "x": found.text,
                        "target": f"≥ {goal[1]:g}" if counts else "—",
                        "met": is_met(found, goal[1]) if counts else "—",
                    }
                )
    return rows


def strict_of(name: str, results: SweepResults) -> dict[str, Any]:
    """Of the best of CANDIDATES to the best chunk of strict fcfs, at the goal of this trace."""
    target, wanted = STRICT_GOALS.get(name, (0.99, 2.0))
    labels = [label for label in results.labels() if results.rates(label)]
    mine = best(results, [label for label in CANDIDATES if label in labels], target, "deadline")
    other = rival(results, [label for label in labels if label.startswith("strict fcfs ")], target, "deadline")
    found = ratio(results, mine, other, target, "deadline")
    return {
        "trace": name,
        "attainment": f"{target:.0%} deadline",
        "best policy": mine,
        "requests/s": cell(results, mine, target, "deadline"),
        "best strict fcfs": other,
        "its requests/s": cell(results, other, target, "deadline"),
        "x": found.text,
        "target": f"≥ {wanted:g}",
        "met": is_met(found, wanted),
        "requests per seed": results.scenario.num_requests,
    }


def claims_of(name: str, results: SweepResults) -> list[dict[str, Any]]:
    """What was published, and what it is here, of those policies that ran."""
    labels = [label for label in results.labels() if results.rates(label)]
    rows: list[dict[str, Any]] = []
    for claim, label, rivals, (low, high) in CLAIMS:
        there = [one for one in rivals if one in labels]
        if label not in labels or not there:
            continue
        for target in TARGETS.get(name, (0.99, 0.9)):
            other = rival(results, there, target, "deadline")
            found = ratio(results, label, other, target, "deadline")
            rows.append(
                {
                    "claim": claim,
                    "trace": name,
                    "attainment": f"{target:.0%} deadline",
                    "compared with": other,
                    "x here": found.text,
                    "reproduced": verdict(found, low, high),
                }
            )
    return rows


def verdict(found: Ratio, low: float, high: float) -> str:
    """Of a ratio with its band, held against what was published: outside of it only if the band is."""
    if not found.value:
        return "not tested"
    is_known = not found.text.startswith(">")
    if is_known and low <= found.value <= high:
        return "yes"
    return "less" if found.high < low else "more" if found.low > high else "within the band"


def printed_ratio(text: str) -> Ratio:
    """What `ratio` wrote, as far as it is printed: an end of the band that is not there is open."""
    numbers = re.match(r"(?:> )?([\d.]+)(?: \((?:> )?([\d.]+)(?: to (> )?([\d.]+))?\))?", text)
    if numbers is None:
        return Ratio(text, 0.0, 0.0, math.inf)
    value, low, is_open, high = numbers.groups()
    return Ratio(text, float(value), float(low or 0), math.inf if is_open or high is None else float(high))


def derived(known: dict[str, Any]) -> dict[str, Any]:
    """A result with its columns `met` and `reproduced` made anew from its ratios as they are printed."""
    made = known | {key: [dict(row) for row in known[key]] for key in ("targets", "strict", "claims") if key in known}
    for row in (*made.get("targets", ()), *made.get("strict", ())):
        goal = row["target"].removeprefix("≥ ")
        row["met"] = "—" if goal == "—" else is_met(printed_ratio(row["x"]), float(goal))
    limits = {claim: wanted for claim, _, _, wanted in CLAIMS}
    for row in made.get("claims", ()):
        row["reproduced"] = verdict(printed_ratio(row["x here"]), *limits[row["claim"]])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", metavar="NAME=FILE")
    parser.add_argument("--json")
    parser.add_argument("--store")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--requests", type=int, default=5000, help="of each seed, if the trace has so many for each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--fairness", action="store_true")
    parser.add_argument("--claims", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--derive", action="store_true")
    arguments = parser.parse_args()
    if arguments.derive:
        if not arguments.json:
            parser.error("--derive makes columns of a result anew; say which one with --json FILE")
        write_json(arguments.json, derived(json.loads(Path(arguments.json).read_text())))
        return
    if not arguments.trace:
        parser.error("--trace NAME=FILE says which requests are simulated; --derive needs none")
    load_before = os.getloadavg()
    if arguments.fairness:
        trace = arguments.trace[0].partition("=")[2]
        fair = fairness_rows(trace, num_requests(trace, arguments), arguments.seeds)
        print_table("fairness among tenants", fair)
        if arguments.json:
            known = json.loads(Path(arguments.json).read_text()) if Path(arguments.json).exists() else {}
            write_json(arguments.json, known | {"fairness": fair, "fairness_command": command()})
        return
    unknown = [label for label in arguments.only if label not in VARIANTS]
    if unknown:
        parser.error(f"--only: there is no {unknown[0]!r}; there is {', '.join(map(repr, VARIANTS))}")
    if arguments.claims:
        arguments.only = list(CLAIMED)
    if arguments.strict:
        wanted = arguments.only or [*(label for label, _ in STRICT), *CANDIDATES]
        arguments.only = [label for label in wanted if label != "strict edf 512"]
    labels = [label for label in VARIANTS if not arguments.only or label in arguments.only]
    known = json.loads(Path(arguments.json).read_text()) if arguments.json and Path(arguments.json).exists() else {}
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    strict: list[dict[str, Any]] = []
    sizes: dict[str, int] = {}
    for given in arguments.trace:
        name, _, trace = given.partition("=")
        results = sweep(name, trace, labels, arguments)
        sizes[name] = results.scenario.num_requests
        rows += rows_of(name, results)
        ratios += ratios_of(name, results)
        claims += [] if arguments.strict else claims_of(name, results)
        strict += [strict_of(name, results)] if arguments.strict else []
        for note in [*results.notes, *results.warnings(), *results.failures]:
            print(note)
    if arguments.strict:
        print_table("against strict fcfs", strict)
        if arguments.json:
            told = [row for row in known.get("strict", []) if row["trace"] not in sizes] + strict
            write_json(arguments.json, known | {"strict": told, "strict_command": command()})
        return
    print_table("highest rate in requests/s (with 95 % band)", rows)
    if ratios:
        print_table("how many times the rate", ratios)
    if claims:
        print_table("what was published", claims)
    if arguments.claims:
        if arguments.json:
            about = f"Claims: {', '.join(f'{num:,} requests per seed of {name}' for name, num in sizes.items())}."
            write_json(arguments.json, known | {"claims": claims, "claims_command": command(), "note": about})
        return
    if arguments.json:
        write_json(
            arguments.json,
            {
                "bench": "slo_science",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {
                    "requests per seed": sizes,
                    "seeds": arguments.seeds,
                    "classes": MIX,
                    "step times": "a100-llama-3-8b",
                    "KV blocks": SHAPE.num_blocks,
                    "tokens per block": SHAPE.block_size,
                    "fcfs chunks": [chunk for chunk in CHUNKS if f"fcfs {chunk}" in labels],
                    "variants": {label: VARIANTS[label] for label in labels},
                    "code": code_digest(),
                    "versions": versions(),
                },
                "targets": ratios,
                "rows": rows,
                "claims": claims,
            }
            | {key: known[key] for key in KEPT if key in known},
        )


if __name__ == "__main__":
    main()
