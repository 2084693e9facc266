"""Requests that schedulers or workers die of, in a fleet of three: they fail, and all trials are on one replica.

Each of them costs two deaths of that replica. Before, it costs a death where the router has sent it: if it comes alone, or with
others to one replica, that is one death for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import RequestFailedError
from actorllm.scheduling.router import LeastLoad, ReplicaView, Routable
from actorllm.supervision.restart import RestartLimits
from tests.actors import deadly_policies
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import DEADLY, VOCAB
from tests.scheduling.chained_tokens import reference_stream

NUM_TOKENS = 25
LONG = 40
"""Tokens of a prompt that names replica 0; one more names the next."""
FIRST_SEED = 200
"""Of streams without the tokens at which scripted workers sleep, fail or die."""


class ByPrompt(LeastLoad):
    """Some prompts name their replica, and the others go where the fewest are."""

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        named = request.num_prompt - LONG
        return named if any(view.number == named for view in views) else super().route(request, views)


@pytest.fixture
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AsyncLLM, int]]:
    """With the token of a prompt that its processes die of. It has a name, for programs to join."""
    workers = with_workers("DeadlyWorkerActor" if request.param == "worker" else "ScriptedWorkerActor")
    quick = RestartLimits(first_delay_s=0.01)
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", workers)
    monkeypatch.setattr(actorllm.client.engine_supervisor, "RestartLimits", lambda: quick)
    policy = {"scheduling_policy": "tests.actors.deadly_policies:WhenItStarts"} if request.param == "scheduler" else {}
    llm = AsyncLLM(
        "storyteller",
        max_num_seqs=16,
        data_parallel_size=3,
        ready_replicas=3,
        name="poisoned",
        router="tests.fleet.test_poison:ByPrompt",
        **policy,
    )
    yield llm, deadly_policies.DEADLY if request.param == "scheduler" else DEADLY
    llm.shutdown()


CASES = {"one": [0], "two": [0, 0], "three": [0, 0, 0], "attached": [1], "spread": [0, 1, 2]}
"""Where the deadly ones go first. In one case they are of a program that has joined."""
QUICK = {("scheduler", "one"), ("scheduler", "attached"), ("scheduler", "spread"), ("worker", "three")}


def cases() -> list[Any]:
    slow = pytest.mark.slow(reason="a fleet of three, and several deaths; the quick cases have each thing once")
    return [
        pytest.param(
            kind, name == "attached", homes, id=f"{kind}-{name}", marks=[] if (kind, name) in QUICK else [slow]
        )
        for kind in ("scheduler", "worker")
        for name, homes in CASES.items()
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(("fleet", "is_attached", "homes"), cases(), indirect=["fleet"])
async def test_they_fail_alone_and_are_tried_on_one_replica(
    fleet: tuple[AsyncLLM, int], is_attached: bool, homes: list[int]
) -> None:
    """Also if one is of a program that has joined, as is half of the others. homes: where the deadly ones go first."""
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

    async def die(number: int, home: int) -> None:
        with pytest.raises(RequestFailedError, match=r"died 2 times"):
            await run(number, [deadly, *range(10, 9 + LONG + home)])

    prompts = {number: [5, 6, 7 + number] for number in range(12)}
    with anyio.fail_after(90):
        async with anyio.create_task_group() as group:
            for number, prompt in prompts.items():
                group.start_soon(run, number, prompt)
                if number == 5:
                    for at, home in enumerate(homes):
                        group.start_soon(die, 99 + 2 * at, home)
    assert found == {n: reference_stream(prompt, FIRST_SEED + n, NUM_TOKENS, VOCAB) for n, prompt in prompts.items()}
    for replica in range(3):  # a death counts when what died is started again
        await owner.complete({"prompt_token_ids": [5]}, SamplingParams(max_tokens=1), data_parallel_rank=replica)
    deaths = [sum(actor.num_restarts for actor in replica.actors.values()) for replica in owner.health().replicas]
    guest.shutdown()
    trial = deaths.index(max(deaths))
    assert sum(deaths) >= 2, "the first may count already, if nothing else was in that step"
    assert deaths[trial] <= 2 * len(homes) + homes.count(trial), "two for each, and one where it came first"
    for replica in {0, 1, 2} - {trial}:
        assert deaths[replica] <= homes.count(replica), "all trials are on one replica"
