"""An engine whose replicas Ray places, and sixteen streams of it."""

from __future__ import annotations

from typing import Any

import anyio

from actorllm import AsyncLLM
from tests.fleet.streams import PROMPTS, params, until

ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "standby_worker": False, "enable_prompt_embeds": True}
ON_RAY: dict[str, Any] = {**ENGINE, "data_parallel_backend": "ray", "data_parallel_size": 2, "router": "round-robin"}
SMALL: dict[str, Any] = {"object_store_memory": 80 << 20}
NUM_STREAMS = 16


async def run_many(llm: AsyncLLM, strike: Any = None) -> list[list[int]]:
    """Sixteen streams; `strike` comes when each of them has ten tokens."""
    found: list[list[int]] = [[] for _ in range(NUM_STREAMS)]

    async def one(number: int) -> None:
        async for output in llm.generate(PROMPTS[number % len(PROMPTS)], params(number)):
            found[number] = list(output.outputs[0].token_ids)

    async with anyio.create_task_group() as group:
        for number in range(NUM_STREAMS):
            group.start_soon(one, number)
        if strike is not None:
            await until(lambda: all(len(tokens) >= 10 for tokens in found))
            assert min(map(len, found)) < 90
            strike()
    return found
