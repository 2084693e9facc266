"""Engines whose worker has a scripted model: it starts quickly, and its process dies of one token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import actorllm.client.engine_supervisor
from actorllm import AsyncLLM, SamplingParams
from actorllm.actors.engine_thread import HostLoop
from actorllm.errors import RequestFailedError
from tests.actors import deadly_policies
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import DEADLY, VOCAB
from tests.scheduling.chained_tokens import reference_stream

WORKER, SCHEDULER = "worker", "scheduler"
DEADLY_TOKENS = {WORKER: DEADLY, SCHEDULER: deadly_policies.DEADLY}
"""In a prompt: what the processes of this actor die of, in an engine of `scripted_engine`."""


@contextmanager
def scripted_engine(**arguments: Any) -> Iterator[AsyncLLM]:
    """Of processes, with a policy that kills its scheduler when a deadly request is admitted."""
    policy = "tests.actors.deadly_policies:WhenItStarts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers("DeadlyWorkerActor"))
        llm = AsyncLLM("storyteller", **({"max_num_seqs": 16, "scheduling_policy": policy} | arguments))
    try:
        yield llm
    finally:
        llm.shutdown()


def params_of(seed: int, max_tokens: int = 30, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, detokenize=False, **more)


def harmless(seed: int, max_tokens: int = 30) -> tuple[list[int], SamplingParams, list[int]]:
    """A prompt, its parameters and the tokens that it gets; none of them is deadly when it is computed again."""
    prompt = [5, 6, 7 + seed]
    chosen = next(s for s in range(seed, seed + 9000, 100) if _is_harmless(prompt, s, max_tokens))
    return prompt, params_of(chosen, max_tokens), reference_stream(prompt, chosen, max_tokens, VOCAB)


def _is_harmless(prompt: list[int], seed: int, max_tokens: int) -> bool:
    return not set(reference_stream(prompt, seed, max_tokens, VOCAB)).intersection(range(4080, VOCAB))


async def end_of_killer(llm: AsyncLLM, victim: str, number: int) -> BaseException | None:
    """The error of a request that kills an actor's process; None: it was answered."""
    try:
        await llm.complete([5, DEADLY_TOKENS[victim], 7 + number], params_of(number))
    except RequestFailedError as error:
        return error
    return None


async def counts_of(llm: AsyncLLM) -> dict[str, Any]:
    """Of the scheduler alone: also while a worker is stopped."""
    answer = await HostLoop.current().result_of(llm._engine.ask_scheduler("statistics"))
    counts: dict[str, Any] = answer["scheduler"]
    return counts
