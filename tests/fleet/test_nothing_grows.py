"""An engine of several replicas whose processes die and whose number changes, again and again: its owner holds no more for it."""

from __future__ import annotations

import os
import threading

import anyio
import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, SamplingParams
from actorllm.supervision.restart import RestartLimits
from tests.actors.scripted_topology import with_workers
from tests.chaos.harness import resident_mib
from tests.fleet.streams import all_run, kill

NUM_TOKENS = 20
NUM_REQUESTS, FIRST_SEED = 7, 200
"""At a time; 84 streams without the tokens at which scripted workers sleep or die when they are computed again."""
VICTIMS = (("scheduler",), ("worker0",), ("scheduler", "worker0"))
NUM_WARM_UPS, SECOND_HALF = 4, 8
MOST_MIB = 4.0
"""That the owner may take in the rounds after the first ones; the memory of a request or two, were each kept."""


def counts_now() -> tuple[int, int]:
    """Descriptors and threads of the owner."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_kills_and_scaling_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers("ScriptedWorkerActor"))
    quick = RestartLimits(first_delay_s=0.01)
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: quick)
    options = {"data_parallel_size": 2, "name": "growth", "standby_worker": False}
    held: list[tuple[int, int, float]] = []
    async with AsyncLLM("storyteller", max_num_seqs=16, **options) as llm:  # type: ignore[arg-type]

        async def ask(seed: int) -> None:
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, detokenize=False)
            output = await llm.complete({"prompt_token_ids": [5, 6, 7 + seed % 100]}, params)
            assert len(output.outputs[0].token_ids) == NUM_TOKENS

        for turn in range(12):
            await all_run(llm)
            if turn >= SECOND_HALF:
                earlier = held[NUM_WARM_UPS:SECOND_HALF]
                with anyio.move_on_after(10):  # a death may still be cleaned up
                    while any(
                        now > max(then) for now, then in zip(counts_now(), zip(*earlier, strict=True), strict=False)
                    ):
                        await anyio.sleep(0.01)
            held.append((*counts_now(), resident_mib([os.getpid()])))
            async with anyio.create_task_group() as group:
                for number in range(NUM_REQUESTS):
                    group.start_soon(ask, FIRST_SEED + NUM_REQUESTS * turn + number)
                if turn % 4 == 3:
                    await llm.scale(1)
                    await llm.scale(2)
                else:
                    pids = llm.health().replicas[turn % 2].pids
                    kill(pids[name] for name in VICTIMS[turn % 4])
    descriptors, threads, mib = zip(*held[NUM_WARM_UPS:], strict=True)
    half = SECOND_HALF - NUM_WARM_UPS
    for counts in (descriptors, threads):
        assert max(counts[half:]) <= max(counts[:half]), counts
    assert mib[-1] - mib[0] < MOST_MIB, mib
