"""Does it help that requests move between replicas? Tails of the wait with and without, by router and memory. Simulated.

    python bench/rescheduling.py --trace conv=CONV.csv [--json FILE] [--seeds N] [--num-requests N]

Llumnix (Sun et al., OSDI 2024): "Llumnix improves tail latencies by an order of magnitude". Its baselines are round-robin and
a router that looks at load. Here KV is not copied: a request that moves while it runs is computed again.

Four replicas of Llama-3-8B on an A100 (published step times), with the lengths and arrivals of the trace, stretched to the rate.
Every seed has a part of the trace of its own. Told are the median of the seeds, the least and the largest ratio.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from report import environment, print_table, write_json

from actorllm.scheduling.cost_model import preset
from actorllm.slo.experiments import Point, Scenario, Variant
from actorllm.slo.rescheduling import Rescheduling
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.workload import Workload

NUM_REPLICAS = 4
RATE = 14.0
"""Requests per second, of all replicas together."""
BLOCKS = {"25,000 blocks": 25_000, "4,000 blocks": 4_000, "2,000 blocks": 2_000}
ROUTERS = ("round-robin", "seconds")
RULES = {
    "none": None,
    "waiting": Rescheduling(moves_running=False),
    "all": Rescheduling(),
}


def shape_of(num_blocks: int) -> EngineShape:
    return EngineShape(num_blocks, max_num_batched_tokens=512, max_model_len=16_384, enable_prefix_caching=False)


def measure(router: str, num_blocks: int, moved: str, workload: Workload, seed: int) -> dict[str, float]:
    run = simulate(
        workload, shape_of(num_blocks), preset("a100-llama-3-8b"), num_replicas=NUM_REPLICAS, router=router, seed=seed,
        rescheduling=RULES[moved], view_interval_s=0.0,
    )  # fmt: skip
    timeline = run.timeline
    return {
        "p99_ttft_s": float(np.quantile(timeline.ttft, 0.99)),
        "p99_e2e_s": float(np.quantile(timeline.e2e, 0.99)),
        "moves": float(len(run.moves)),
        "preemptions": float(timeline.num_preemptions.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, metavar="NAME=FILE")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name, _, path = options.trace.partition("=")
    scenario = Scenario(
        workload=path, num_requests=options.num_requests, model="a100-llama-3-8b", shape=shape_of(max(BLOCKS.values()))
    )
    rows: list[dict[str, Any]] = []
    for memory, num_blocks in BLOCKS.items():
        for router in ROUTERS:
            found: dict[str, list[dict[str, float]]] = {moved: [] for moved in RULES}
            for seed in range(options.seeds):
                workload = Point(scenario=scenario, variant=Variant.parse("fcfs@512"), rate=RATE, seed=seed).workload()
                for moved in RULES:
                    found[moved].append(measure(router, num_blocks, moved, workload, seed))
            for moved, runs in found.items():
                ratios = [b["p99_ttft_s"] / a["p99_ttft_s"] for a, b in zip(runs, found["none"], strict=True)]
                means = {key: round(float(np.mean([one[key] for one in runs])), 3) for key in runs[0]}
                better = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                rows.append(
                    {"memory": memory, "router": router, "moved": moved, **means, "p99 ttft, times better": better}
                )
    print_table("requests that move", rows)
    if options.json is not None:
        told = {"bench": "rescheduling", "environment": environment(), "configuration": {"trace": name}, "rows": rows}
        write_json(options.json, told)


if __name__ == "__main__":
    main()
