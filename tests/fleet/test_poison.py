"""A request that schedulers or workers die of, in a fleet of three: it fails, and all trials are on one replica."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import RequestFailedError
from actorllm.supervision.restart import RestartLimits
from tests.actors import deadly_policies
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import DEADLY, VOCAB
from tests.scheduling.chained_tokens import reference_stream

NUM_TOKENS = 25
FIRST_SEED = 200
"""Of streams without the tokens at which scripted workers sleep, fail or die."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["scheduler", "worker"])
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AsyncLLM, int]]:
    """With the token of a prompt that its processes die of. It has a name, for programs to join."""
    workers = with_workers("DeadlyWorkerActor" if request.param == "worker" else "ScriptedWorkerActor")
    quick = RestartLimits(first_delay_s=0.01)
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", workers)
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: quick)
    policy = {"scheduling_policy": "tests.actors.deadly_policies:WhenItStarts"} if request.param == "scheduler" else {}
    llm = AsyncLLM("storyteller", max_num_seqs=16, data_parallel_size=3, ready_replicas=3, name="poisoned", **policy)
    yield llm, deadly_policies.DEADLY if request.param == "scheduler" else DEADLY
    llm.shutdown()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("is_attached", "num_deadly"), [(False, 1), (True, 1), (False, 3)], ids=["own", "attached", "three"]
)
async def test_it_fails_alone_and_is_tried_on_one_replica(
    fleet: tuple[AsyncLLM, int], is_attached: bool, num_deadly: int
) -> None:
    """Also if it is of a program that has joined, as is half of the others."""
    owner, deadly = fleet
    await owner.start()
    guest = AsyncLLM.attach("poisoned") if is_attached else owner
    await guest.start()
    found: dict[int, list[int]] = {}

    async def run(number: int, prompt: list[int]) -> None:
        llm = guest if number % 2 else owner
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=FIRST_SEED + number, detokenize=False)
        output = await llm.complete({"prompt_token_ids": prompt}, params)
        found[number] = list(output.outputs[0].token_ids)

    async def die(number: int) -> None:
        with pytest.raises(RequestFailedError, match=r"died 2 times"):
            await run(number, [5, deadly, number])

    prompts = {number: [5, 6, 7 + number] for number in range(12)}
    with anyio.fail_after(90):
        async with anyio.create_task_group() as group:
            for number, prompt in prompts.items():
                group.start_soon(run, number, prompt)
                if number == 5:
                    group.start_soon(die, 99)
    assert found == {n: reference_stream(prompt, FIRST_SEED + n, NUM_TOKENS, VOCAB) for n, prompt in prompts.items()}
    deaths = sorted(sum(actor.num_restarts for actor in replica.actors.values()) for replica in owner.health().replicas)
    assert deaths[-1], "something died"
    assert sum(deaths[:-1]) <= 1, "it costs one death where it came first, and all trials are on one replica"
    guest.shutdown()
