"""How many threads a worker computes with, and how they wait. Free of torch: read before the worker is exec'd.

The wait policy can only be set through the environment of the process, because the OpenMP runtime reads it once, when
torch is loaded. The supervisor (or whoever execs the worker) merges `worker_environment` into the child's environment;
the inline topology lives with what the host process has.
"""

from __future__ import annotations

import os

from actorllm.config import EngineConfig

SPIN_COUNT = 5_000
"""Rounds a team member polls before it sleeps, some 50 to 100 µs.

Waking a sleeping member costs about 50 µs on every parallel region, and a decode step has a hundred of them: without
any spinning two threads are slower than one. The gaps between the regions of a step are below 50 µs, so this much
spinning keeps the team awake within a step and lets it sleep between steps. libgomp's default (30 billion rounds) would
hold a core for as long as the engine is idle, and on a machine with two cores starve the scheduler process.
"""


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads(config: EngineConfig) -> int:
    """The largest team a worker of this engine uses: what was asked for, or every core it may run on."""
    return config.num_threads if config.num_threads is not None else num_cores()


def worker_environment(config: EngineConfig) -> dict[str, str]:
    """What must be in a worker's environment before it loads torch; variables the user has set are left alone."""
    wanted = {
        "OMP_NUM_THREADS": str(num_threads(config)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}
