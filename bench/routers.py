"""What do routers give on published traces, in the simulator?

    python bench/routers.py [--traces FOLDER] [--seeds N] [--requests N] [--json FILE]

Four simulated replicas of an A100 with Llama 3 8B (the engine's own scheduler in virtual time, views 0.1 s old, caches exact) serve
the same requests under each router. Each seed takes another stretch of a trace, or draws the mix anew; its requests arrive at the
rate below. The mix has lengths with heavy tails, and 64 beginnings of prompts that are unequally popular.

Times to the first token, in seconds, and the share of prompt tokens that came from a cache: medians over the seeds. The ratios are
means over the seeds of `seconds` to another router, seed by seed, with the interval that holds the mean at 95 % (Student's t on
logarithms). Targets: a p99 of at most 0.8 of both, with at least 0.95 of the cached share of prefix-aware. Traces that are not in
FOLDER are left out.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from report import environment, print_table, versions, write_json

from actorllm.scheduling.cost_model import preset
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.traces import load_trace
from actorllm.slo.workload import (
    Workload,
    gamma_arrivals,
    lognormal_lengths,
    make_workload,
    seed_stream,
    share_prefixes,
)

TRACES = {
    "mooncake_conversation.jsonl": 1.6,
    "mooncake_synthetic.jsonl": 2.0,
    "AzureLLMInferenceTrace_conv.csv": 20.0,
    "AzureLLMInferenceTrace_code.csv": 12.0,
}
"""Requests per second: such that some wait, and the queues do not grow without end."""
MIX, MIX_RATE = "mix", 8.0
ROUTERS = ("round-robin", "least-load", "prefix-aware", "seconds")
NUM_REPLICAS, VIEW_AGE_S = 4, 0.1
LONG = EngineShape(num_blocks=24_576, max_model_len=131_072)
SHORT = EngineShape(num_blocks=8_192)
JUDGEMENTS = (
    *("p99 to round-robin", "less than 0.8 of round-robin", "p99 to prefix-aware", "less than 0.8 of prefix-aware"),
    *("cached to prefix-aware", "at least 0.95 of it"),
)
"""Columns of the row of `seconds`. Where no prompts begin alike, nothing is cached; "no": it does not win by as much there."""
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Of means of so many values."""


def stretch(trace: Workload, num: int, rate: float, seed: int) -> Workload:
    """So many requests in a row, from anywhere."""
    first = int(seed_stream(seed, "stretch of the trace").integers(max(1, len(trace) - num)))
    return trace.select(np.arange(first, min(first + num, len(trace)))).at_rate(rate)


def mix(num: int, rate: float, seed: int) -> Workload:
    """Lengths with heavy tails, and beginnings in common."""
    lengths = lognormal_lengths(num, (1800, 9000), (160, 1200), longest=16_000, seed=seed)
    drawn = make_workload(gamma_arrivals(num, rate, 1.5, seed), lengths, MIX)
    return share_prefixes(drawn, num_groups=64, num_tokens=1024, block_tokens=64, skew=1.1, seed=seed)


def run(workload: Workload, shape: EngineShape, router: str, seed: int) -> dict[str, float]:
    """What came of it."""
    found = simulate(
        workload,
        shape,
        preset("a100-llama-3-8b"),
        num_replicas=NUM_REPLICAS,
        router=router,
        view_interval_s=VIEW_AGE_S,
        seed=seed,
    )
    waits = found.timeline.first_token - found.timeline.arrival
    waits = waits[np.isfinite(waits)]
    p50, p99 = np.quantile(waits, (0.5, 0.99))
    cached = float(found.timeline.num_cached.sum() / workload.num_prompt.sum())
    return {"p50": float(p50), "p99": float(p99), "cached": cached}


def band(ratios: list[float]) -> list[float]:
    """The mean of these, and its interval at 95 %."""
    logs = np.log(ratios)
    half = STUDENT_95.get(len(logs), 2.0) * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    mean = float(logs.mean())
    return [math.exp(mean), math.exp(mean - half), math.exp(mean + half)]


def judged(name: str, rate: float, runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each router; that of `seconds` has the ratios to the others."""
    rows = []
    for router, of_seeds in runs.items():
        medians = {key: float(np.median([one[key] for one in of_seeds])) for key in ("p50", "p99", "cached")}
        row = {"workload": name, "rate": rate, "router": router, **{k: round(v, 3) for k, v in medians.items()}}
        rows.append(row | dict.fromkeys(JUDGEMENTS, "—"))
    ours = runs["seconds"]
    for other in ("round-robin", "prefix-aware"):
        theirs = runs[other]
        found = band([a["p99"] / b["p99"] for a, b in zip(ours, theirs, strict=True)])
        rows[-1][f"p99 to {other}"] = "{:.2f} ({:.2f} to {:.2f})".format(*found)
        rows[-1][f"less than 0.8 of {other}"] = found[0] <= 0.8
    if all(one["cached"] for one in runs["prefix-aware"]):
        found = band([a["cached"] / b["cached"] for a, b in zip(ours, runs["prefix-aware"], strict=True)])
        rows[-1]["cached to prefix-aware"] = "{:.2f} ({:.2f} to {:.2f})".format(*found)
        rows[-1]["at least 0.95 of it"] = found[0] >= 0.95
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="the folder of the published traces")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1500, help="of a run")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    every: dict[str, Any] = {}
    for name, rate in {**TRACES, MIX: MIX_RATE}.items():
        trace: Workload | None = None
        if name != MIX:
            if not (arguments.traces / name).exists():
                print(f"{name} is not in {arguments.traces}, and left out")
                continue
            trace = load_trace(arguments.traces / name).workload.fitting(LONG.max_model_len)
        runs: dict[str, list[dict[str, float]]] = {router: [] for router in ROUTERS}
        for seed in range(arguments.seeds):
            workload = (
                mix(arguments.requests, rate, seed) if trace is None else stretch(trace, arguments.requests, rate, seed)
            )
            for router in ROUTERS:
                runs[router].append(run(workload, SHORT if trace is None else LONG, router, seed))
        every[name] = runs
        rows += judged(name, rate, runs)
        print_table(name, [row for row in rows if row["workload"] == name])
    if arguments.json:
        configuration = {"seeds": arguments.seeds, "requests": arguments.requests, "versions": versions()}
        write_json(
            arguments.json,
            {
                "bench": "routers",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": configuration,
                "rows": rows,
                "runs": every,
            },
        )


if __name__ == "__main__":
    main()
