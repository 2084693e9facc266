"""Requests of every kind, what their callers have of them, and what is done to replicas meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

from actorllm import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from actorllm.scheduling.router import ReplicaView, Routable
from actorllm.types.structured_outputs import StructuredOutputsParams

NUM_TOKENS = 90
PROMPTS = [f"Once upon a time, in forest number {number}," for number in range(6)]


class ToTheFirst:
    """A router: what happens to one replica happens to all requests."""

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        return views[0].number


def params(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "temperature": 0.9, "seed": seed, "ignore_eos": True} | more))


def embeds() -> dict[str, Any]:
    rows = np.random.default_rng(3).normal(size=(9, 256)).astype(np.float32) * 0.02
    return {"prompt_embeds": rows}


REQUESTS: dict[str, tuple[Any, SamplingParams]] = {
    "plain": (PROMPTS[0], params(1)),
    "greedy": (PROMPTS[1], params(2, temperature=0.0)),
    "penalties and logprobs": (
        PROMPTS[2],
        params(3, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1, logprobs=2),
    ),
    "n": (PROMPTS[3], params(4, n=2)),
    "grammar": (PROMPTS[4], params(5, structured_outputs=StructuredOutputsParams(regex="[a-z ]{80,200}"))),
    "final only": (PROMPTS[5], params(6, output_kind=RequestOutputKind.FINAL_ONLY)),
    "prompt logprobs": (PROMPTS[0], params(7, prompt_logprobs=1)),
    "embeddings": (embeds(), params(8)),
    "short": (PROMPTS[1], params(9, max_tokens=4)),
}


class Told(NamedTuple):
    """What the caller of a request has of it."""

    sequences: list[tuple[list[int], str, str | None]]
    logprobs: list[dict[int, float]]

    @classmethod
    def of(cls, output: RequestOutput) -> Told:
        entries = [at for one in output.outputs for at in one.logprobs or []]
        entries += [at for at in output.prompt_logprobs or [] if at is not None]
        return cls(
            [(list(one.token_ids), one.text, one.finish_reason) for one in output.outputs],
            [{token: entry.logprob for token, entry in at.items()} for at in entries],
        )


def assert_same(found: dict[str, Told], wanted: dict[str, Told]) -> None:
    """The same tokens, texts and ends; log-probabilities differ by rounding, as the batches do."""
    for name, one in wanted.items():
        assert found[name].sequences == one.sequences, name
        for mine, theirs in zip(found[name].logprobs, one.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3), name


async def run_all(llm: AsyncLLM, at_token: int = 0, do: Any = None, **more: Any) -> dict[str, Told]:
    """Every request at once; `do` is called when the first of them has so many tokens."""
    found: dict[str, Told] = {}
    is_time = anyio.Event()

    async def one(name: str, prompt: Any, sampling: SamplingParams) -> None:
        last, newest = None, {}
        async for output in llm.generate(prompt, sampling, **more):
            last = output
            newest |= {one.index: one for one in output.outputs}  # siblings may end in different steps
            if name == "plain" and len(output.outputs[0].token_ids) >= at_token:
                is_time.set()
        assert last is not None
        last.outputs = [newest[index] for index in sorted(newest)]
        found[name] = Told.of(last)

    async with anyio.create_task_group() as group:
        for name, (prompt, sampling) in REQUESTS.items():
            group.start_soon(one, name, prompt, sampling)
        if do is not None:
            await is_time.wait()
            await do()
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def until(condition: Any) -> None:
    with anyio.fail_after(120):
        while not condition():
            await anyio.sleep(0.01)


async def all_run(llm: AsyncLLM) -> None:
    await until(lambda: all(replica.state == "running" for replica in llm.health().replicas))


def moved(llm: AsyncLLM) -> int:
    return int(llm._engine.statistics()["frontend"]["num_moved"])
