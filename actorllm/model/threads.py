"""How many threads a worker computes with, and how they wait. Free of torch: read before the worker is exec'd.

The wait policy can only be set through the environment of the process, because the OpenMP runtime reads it once, when
torch is loaded. The supervisor (or other code that execs the worker) merges `worker_environment` into the child's environment;
the inline topology lives with what the host process has.
"""

from __future__ import annotations

import os

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError

ROUNDING = 1e-9

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
    """The largest team a worker of this engine uses: what was asked for, or its share of the cores it may run on.

    Engines whose shares add up to 1 use as many threads together as there are cores, unless a share is less than a core.
    """
    if config.num_threads is not None:
        return config.num_threads
    share = 1.0 if config.cpu_share is None else config.cpu_share
    cores = int(num_cores() * share + ROUNDING)  # 100 * 0.29 is a little less than 29
    return max(1, cores // config.ranks_per_machine)


def worker_environment(config: EngineConfig) -> dict[str, str]:
    """What must be in a worker's environment before it loads torch; variables the user has set are left alone."""
    wanted = {
        "OMP_NUM_THREADS": str(num_threads(config)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        # Every shape of a product is a kernel in oneDNN's cache; its 1,024 entries are not enough for mixed batches.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4096",
        # Freed activations stay with the process: mapping them anew in every step costs more than computing them.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        # Every product makes and drops a few hundred small objects in oneDNN. Kept per thread and by size, instead of in
        # lists that each larger `free` merges, they cost a quarter less of what a product costs beside its arithmetic.
        # One arena for all threads: new weights, which a thread beside the steps packs, then take the memory of old ones. The
        # arenas of other threads have at most 64 MiB in a piece, and fresh pages take longer than packing.
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=127:glibc.malloc.mxfast=0:glibc.malloc.arena_max=1",
        # Large pages for what torch allocates: fewer misses while weights stream through, some per cent of a step.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    environment = {name: value for name, value in wanted.items() if name not in os.environ}
    if config.device == "cuda" and config.data_parallel_size > 1:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(config, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return environment


def visible_devices(config: EngineConfig, known: str | None) -> str:
    """The GPUs of one of several replicas, as the driver reads them. known: those that this process sees; None: all.

    Raises ConfigError: there are too few.
    """
    last = config.first_device + config.world_size
    names = [str(number) for number in range(last)] if known is None else [name for name in known.split(",") if name]
    if len(names) < last:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} with tensor_parallel_size={config.world_size} needs "
            f"{config.data_parallel_size * config.world_size} GPUs, and CUDA_VISIBLE_DEVICES={known!r} names {len(names)}"
        )
    return ",".join(names[config.first_device : last])
