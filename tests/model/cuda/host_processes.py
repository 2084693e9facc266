"""Engines whose worker launches ahead, on the emulated device in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import signal

import anyio

from actorllm import AsyncLLM, SamplingParams
from actorllm.actors.topology import Topology
from tests.model.cuda.twins import prompt

NUM_STREAMS = 5


def on_the_host(topology: Topology, worker: str = "tests.model.cuda.host_worker:HostWorkerActor") -> Topology:
    """With workers of this class."""
    actors = tuple(dataclasses.replace(a, path=worker) if a.name.startswith("worker") else a for a in topology.actors)
    return dataclasses.replace(topology, actors=actors)


async def tell(llm: AsyncLLM, victims: tuple[str, ...] = ()) -> list[list[int]]:
    """What all streams bring; the victims are killed in the middle."""
    told: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
    to_kill = list(victims)

    async def listen(i: int) -> None:
        penalty = {"repetition_penalty": 1.4} if i == 2 else {}
        params = SamplingParams(
            max_tokens=40, temperature=i / 4, seed=i, ignore_eos=True, detokenize=False, top_p=1 - i / 20, **penalty
        )
        async for output in llm.generate({"prompt_token_ids": prompt(20 + 10 * i, i)}, params):
            told[i] = list(output.outputs[0].token_ids)
            if to_kill and len(told[i]) >= 8:
                os.kill(llm._engine.pids[to_kill.pop()], signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        for i in range(NUM_STREAMS):
            tasks.start_soon(listen, i)
    return told
