"""Which policy serves the highest rate within the objectives? Latency-sensitive and best-effort requests, real arrivals.

    python bench/slo_science.py --trace conv=CONV.csv --trace code=CODE.csv [--json FILE] [--store FILE] [--only LABEL ...]
                                [--fairness]

Simulated: Llama-3-8B on one A100 (published step times), 25,000 KV blocks of 16 tokens. Half of the requests are latency
sensitive (first token within 0.5 s + 1 s for every 4,000 prompt tokens, then one every 50 ms), half best effort (end within
120 s). Lengths and arrivals of the Azure LLM inference traces of 2023, stretched to the rate; every seed begins somewhere
else in the trace and draws other classes. A rate counts when 99 % (90 %) of the class that is worst off are served within
their objective, with the same requests for all policies; bands are bootstrapped over seeds and blocks of requests. Deadline:
token i is due at arrival + ttft + i * tpot. TPOT: the mean gap of a request is at most tpot. Rates are bisected for the
deadline reading; the other one is counted at the same rates, and "below" the lowest of them it was not looked for.

Fairness is another question, asked of the first trace only: four tenants, one of whom sends 70 % of the requests, at a rate
beyond what the engine can take.

--store keeps every point, so that a run may be continued; --only runs some of the policies, by their label; --fairness only
that question.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from report import command, environment, print_table, versions, write_json

from actorllm.objective import Reading
from actorllm.slo.experiments import Ladder, Point, Results, Scenario, Sweep, Variant, ratio_band
from actorllm.slo.fairness import fairness_of
from actorllm.slo.simulator import EngineShape

MIX = "ls:0.5:ttft=0.5+p/4000,tpot=0.05,priority=0 be:0.5:e2e=120,priority=1"
SHAPE = EngineShape(num_blocks=25_000, block_size=16, max_model_len=16_384, enable_prefix_caching=False)
CHUNKS = (256, 512, 1024, 2048, 4096)
FCFS = [(f"fcfs {chunk}", f"fcfs@{chunk}") for chunk in CHUNKS]
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
]
"""Label and variant. Chunks of those with a dynamic one are what a step may hold at most."""
STARTS = {"conv": 2.5, "code": 0.4}
TARGETS = {"conv": (0.99, 0.9), "code": (0.9,)}
"""On code, with its bursts, 99 % is out of reach of everybody at any rate worth running at."""
TENANTS = (0.7, 0.1, 0.1, 0.1)
FAIRNESS_RATE = 4.5
READINGS: tuple[Reading, ...] = ("deadline", "tpot")
GOALS = {"conv": (0.99, 1.7), "code": (0.9, 3.0)}
"""At which attainment the best policy is to have how many times the rate of the best fcfs chunk, in the deadline reading."""


def sweep(name: str, trace: str, pairs: list[tuple[str, str]], arguments: argparse.Namespace) -> Results:
    scenario = Scenario(workload=trace, num_requests=arguments.requests, mix=MIX, shape=SHAPE)
    variants = [Variant.parse(text, label) for label, text in pairs]
    return Sweep(scenario, variants, seeds=range(arguments.seeds)).run(
        targets=TARGETS.get(name, (0.99, 0.9)),
        readings=("deadline",),
        who=("worst",),
        ladder=Ladder(STARTS.get(name, 1.0), step=0.04),
        store=arguments.store and f"{arguments.store}.{name}",
        num_processes=arguments.processes,
        on_progress=lambda done, known, point: print(f"{name}: {done}/{known} {point}", flush=True),
    )


def cell(results: Results, label: str, target: float, reading: Reading) -> str:
    found = results.max_rate(label, target, reading)
    if found is None:
        return f"below {min(results.rates(label)):.2f}" if results.rates(label) else "—"
    warning = "" if found.verdict == "stationary" else f", {found.verdict}"
    return f"{found.rate:.2f} ({found.low:.2f} to {found.high:.2f}{warning})"


def rows_of(name: str, results: Results) -> list[dict[str, Any]]:
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


def fairness_rows(trace: str, num_requests: int, seeds: int) -> list[dict[str, Any]]:
    """Means over the seeds."""
    scenario = Scenario(workload=trace, num_requests=num_requests, mix=MIX, shape=SHAPE, tenants=TENANTS)
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
        gap = statistics.mean(fair.gap for fair in found)
        rows.append(
            {
                "policy": text.replace("@", " "),
                "requests/s": FAIRNESS_RATE,
                "queue p99 of who sends 70 %, s": round(heavy, 1),
                "of the worst of the others, s": round(light, 1),
                "largest gap in service within a window": f"{gap / 1000:.0f}k tokens",
                "all requests in time, deadline": f"{statistics.mean(kept):.0%}",
            }
        )
    return rows


def best(results: Results, labels: list[str], target: float, reading: Reading) -> str:
    def rate(label: str) -> float:
        found = results.max_rate(label, target, reading)
        return 0.0 if found is None else found.rate

    return max(labels, key=rate)


def ratios_of(name: str, results: Results) -> list[dict[str, Any]]:
    """Of the best policy to the best fcfs chunk, and to the best chunk of static priorities."""
    labels = results.labels()
    others = [label for label, _ in OTHERS if label in labels]
    rows: list[dict[str, Any]] = []
    if not others:
        return rows
    for reading in READINGS:
        for target in TARGETS.get(name, (0.99, 0.9)):
            winner = best(results, others, target, reading)
            for kind in ("fcfs", "priority", "edf"):
                tuned = [label for label in labels if label.startswith(f"{kind} ")]
                if not tuned:
                    continue
                rival = best(results, tuned, target, reading)
                band = ratio_band(results, winner, rival, target, reading)
                goal = GOALS.get(name, (0.0, 0.0))
                counts = kind == "fcfs" and reading == "deadline" and goal[0] == target
                rows.append(
                    {
                        "trace": name,
                        "attainment": f"{target:.0%} {reading}",
                        "best policy": winner,
                        "compared with the best": rival,
                        "x": "—" if band is None else f"{band.value:.2f} ({band.low:.2f} to {band.high:.2f})",
                        "target": f"≥ {goal[1]:g}" if counts else "—",
                        "met": (band is not None and band.value >= goal[1]) if counts else "—",
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--json")
    parser.add_argument("--store")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--fairness", action="store_true")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    if arguments.fairness:
        fair = fairness_rows(arguments.trace[0].partition("=")[2], arguments.requests, arguments.seeds)
        print_table("fairness among tenants", fair)
        if arguments.json:
            known = json.loads(Path(arguments.json).read_text()) if Path(arguments.json).exists() else {}
            write_json(arguments.json, known | {"fairness": fair, "fairness_command": command()})
        return
    known = json.loads(Path(arguments.json).read_text()) if arguments.json and Path(arguments.json).exists() else {}
    pairs = [(label, text) for label, text in FCFS + OTHERS if not arguments.only or label in arguments.only]
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for given in arguments.trace:
        name, _, trace = given.partition("=")
        results = sweep(name, trace, pairs, arguments)
        rows += rows_of(name, results)
        ratios += ratios_of(name, results)
        for failure in results.failures:
            print(failure)
    print_table("highest rate in requests/s (with 95 % band)", rows)
    if ratios:
        print_table("how many times the rate", ratios)
    if arguments.json:
        write_json(
            arguments.json,
            {
                "bench": "slo_science",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {
                    "requests per seed": arguments.requests,
                    "seeds": arguments.seeds,
                    "classes": MIX,
                    "step times": "a100-llama-3-8b",
                    "KV blocks": SHAPE.num_blocks,
                    "tokens per block": SHAPE.block_size,
                    "fcfs chunks": list(CHUNKS),
                    "variants": dict(FCFS + OTHERS),
                    "versions": versions(),
                },
                "targets": ratios,
                "rows": rows,
            }
            | {key: known[key] for key in ("fairness", "fairness_command") if key in known},
        )


if __name__ == "__main__":
    main()
