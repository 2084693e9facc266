"""The peer of `bench/nodes.py`: tokens that an actor of Ray yields to its driver, one object for each, as streaming generators do.

    python nodes_peer.py STREAMS TOKENS ROUNDS

Prints, as JSON, the driver's processor time for each token in each round, in microseconds. Ray's own processes are not counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import ray

PAUSE_S = 0.01
"""Between two tokens of a stream: about a step of the other side."""


class Writer:
    async def write(self, num_tokens: int) -> AsyncIterator[list[int]]:
        for number in range(num_tokens):
            await asyncio.sleep(PAUSE_S)
            yield [number]


async def drive(writer: Any, num_streams: int, num_tokens: int) -> float:
    async def stream() -> int:
        found = 0
        async for item in writer.write.options(num_returns="streaming").remote(num_tokens):
            found += len(await item)
        return found

    began = time.process_time()
    num_found = sum(await asyncio.gather(*[stream() for _ in range(num_streams)]))
    used = time.process_time() - began
    assert num_found == num_streams * num_tokens
    return 1e6 * used / num_found


def main() -> None:
    num_streams, num_tokens, num_rounds = map(int, sys.argv[1:])
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    writer = ray.remote(Writer).options(num_cpus=1, max_concurrency=num_streams).remote()
    found = [asyncio.run(drive(writer, num_streams, num_tokens)) for _ in range(num_rounds + 1)]
    print(json.dumps({"cpu_us": found[1:], "version": ray.__version__}))  # the first warms up
    ray.shutdown()


if __name__ == "__main__":
    main()
