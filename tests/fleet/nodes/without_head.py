"""A program whose cluster of Ray loses its head under sixteen streams. `test_ray_cluster` runs it and reads what it prints."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from actorllm import AsyncLLM
from tests.fleet.nodes.ray_engine import ON_RAY, SMALL, run_many
from tests.fleet.streams import all_run, moved


async def outlive(head: Any) -> str:
    llm = AsyncLLM("storyteller", **ON_RAY)
    await llm.start()
    await all_run(llm)
    wanted = await run_many(llm)

    def strike() -> None:
        for name in ("gcs_server", "raylet"):
            (told,) = head.all_processes[name]
            os.kill(told.process.pid, signal.SIGKILL)

    found = await run_many(llm, strike)
    num_moved = moved(llm)
    later = await run_many(llm)
    llm.shutdown()
    same, new = (sum(map(list.__eq__, one, wanted)) for one in (found, later))
    return f"{same} streams are the same, {num_moved} have moved, {new} new ones are the same"


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL})
    for _ in range(2):
        cluster.add_node(num_cpus=2, **SMALL)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    print(asyncio.run(outlive(cluster.head_node)), flush=True)
    print("ended", flush=True)
    os._exit(0)  # Ray's own end would wait for its head


if __name__ == "__main__":
    main()
