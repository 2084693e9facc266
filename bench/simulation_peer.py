"""One process of `bench/simulation.py --against`: simulates requests by the tree that it is told.

    python simulation_peer.py TREE

Reads one run per line (JSON: kind, requests, trace or null), and answers with the seconds of CPU that it took, the steps that
were planned and skipped, and the peak memory of the process in MiB. Kinds: one replica, 64 of them, or sessions on one. The
workload, which is made once, has no part in the time.
"""

from __future__ import annotations

import functools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

REPLICAS = {"one": 1, "many": 64, "sessions": 1}


def main() -> None:
    tree = Path(sys.argv[1])
    sys.path[:0] = [str(tree / "bench"), str(tree), str(tree / "kernels")]
    import simulation  # type: ignore[import-not-found,unused-ignore]

    @functools.cache
    def workload_of(kind: str, num: int, trace: str | None) -> Any:
        if kind != "sessions":
            return simulation.conversations(num, trace).at_rate(simulation.RATE * REPLICAS[kind])
        from actorllm.slo.sessions import conversations

        return conversations(num, simulation.RATE, seed=1)

    for line in sys.stdin:
        kind, num, trace = json.loads(line)
        workload = workload_of(kind, num, trace)
        shape = simulation.EngineShape(num_blocks=25_000, max_num_batched_tokens=512)
        model = simulation.preset("a100-llama-3-8b")
        router = "round-robin" if REPLICAS[kind] == 1 else "least-load"
        arguments = {
            "num_replicas": REPLICAS[kind],
            "router": router,
            "view_interval_s": 0.0,
        }  # as old trees by default
        began = time.process_time()
        run = simulation.simulate(workload, shape, model, policy="fcfs", **arguments)
        took = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps([took, run.num_steps - run.num_steps_skipped, run.num_steps_skipped, peak]), flush=True)


if __name__ == "__main__":
    main()
