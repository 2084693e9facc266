"""How many requests per second does the simulator get through, and what does a step of it cost policy and scheduler?

    python bench/simulation.py [--json FILE] [--requests N] [--trace FILE]

Conversations: lengths and burstiness like those of the Azure trace of 2023, which --trace replaces by a file (it is repeated
as often as need be). One core, the published step times of an A100 with Llama-3-8B. The share of the policy is measured in a
run of its own, in which every one of its calls is timed. Targets: a million requests on one replica in 6 minutes, and over 64
replicas in 20.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

from report import environment, print_table, versions, write_json

from actorllm.scheduling.policy import PlanPolicy, load_policy
from actorllm.slo.cost_model import preset
from actorllm.slo.simulator import EngineShape, Run, simulate
from actorllm.slo.traces import load_trace
from actorllm.slo.workload import Workload, assign_classes, parse_mix, synthetic

MIX = "ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120"
RATE = 3.0
ONE_REPLICA, MANY_REPLICAS = 1e6 / 360, 1e6 / 1200
CASES = (
    ("fcfs", 512, 1, "round-robin", ONE_REPLICA),
    ("priority", 512, 1, "round-robin", None),
    ("edf", 512, 1, "round-robin", None),
    ("cohost", 2048, 1, "round-robin", None),
    ("qoserve", 2048, 1, "round-robin", None),
    ("fcfs", 512, 64, "round-robin", MANY_REPLICAS),
    ("fcfs", 512, 64, "least-load", MANY_REPLICAS),
)
"""Policy, tokens per step, replicas, router, and requests per second that are wanted."""


class Timed:
    """A policy whose every call is timed."""

    def __init__(self, policy: PlanPolicy) -> None:
        self._policy = policy
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._policy, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            value = found(*arguments)
            self.seconds += time.perf_counter() - began
            return value

        return call


def timed_run(run: Callable[..., Run], **arguments: Any) -> tuple[Run, float]:
    began = time.process_time()
    return run(**arguments), time.process_time() - began


def measure(case: tuple[str, int, int, str, float | None], workload: Workload) -> dict[str, Any]:
    policy, tokens, num_replicas, router, wanted = case
    shape = EngineShape(num_blocks=25_000, max_num_batched_tokens=tokens)
    arguments: dict[str, Any] = {
        "workload": workload.at_rate(RATE * num_replicas),
        "shape": shape,
        "model": preset("a100-llama-3-8b"),
        "num_replicas": num_replicas,
        "router": router,
    }
    run, seconds = timed_run(simulate, policy=policy, **arguments)
    watched: list[Timed] = []

    def build() -> PlanPolicy:
        watched.append(Timed(load_policy(policy)))
        return watched[-1]  # type: ignore[return-value]

    _, slower = timed_run(simulate, policy=build, **arguments)
    num_planned = run.num_steps - run.num_steps_skipped
    of_policy = sum(timed.seconds for timed in watched)
    per_second = len(workload) / seconds
    return {
        "policy": policy,
        "replicas": num_replicas,
        "router": router if num_replicas > 1 else "—",
        "requests/s": round(per_second),
        "steps planned": num_planned,
        "steps skipped": run.num_steps_skipped,
        "µs per planned step": round(1e6 * seconds / num_planned, 1),
        "of it policy": round(1e6 * of_policy / num_planned * min(1.0, seconds / slower), 1),
        "target": f"≥ {wanted:.0f}" if wanted else "—",
        "met": per_second >= wanted if wanted else "—",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--trace")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    num = arguments.requests
    workload = load_trace(arguments.trace).workload.repeated(num) if arguments.trace else synthetic(num, RATE, seed=1)
    workload = assign_classes(workload, parse_mix(MIX), seed=1)
    rows = [measure(case, workload) for case in CASES]
    print_table("simulated requests per second of one core", rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory {peak:.0f} MiB")
    if arguments.json:
        write_json(
            arguments.json,
            {
                "bench": "simulation",
                "environment": environment(),
                "load_before": [round(x, 2) for x in load_before],
                "configuration": {
                    "requests": num,
                    "rate per replica": RATE,
                    "classes": MIX,
                    "step times": "a100-llama-3-8b",
                    "peak MiB": round(peak),
                    "versions": versions(),
                },
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
