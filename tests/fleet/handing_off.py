"""Prompts that one replica computes and another one decodes, and what both count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import actorllm.fleet.dispatcher
from actorllm import AsyncLLM
from actorllm.scheduling.role_router import RoleRouter
from tests.fleet.streams import params

PREFILL, DECODE = 0, 1
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 8, "standby_worker": False}
LONG = (
    "Once upon a time there was a bear who lived in a deep dark forest near a lake, and in that forest there was honey. "
    * 2
)
PROMPTS = [f"{LONG} It was number {number}" for number in range(6)]


def hand_off_every_prompt() -> Iterator[None]:
    """What a fixture of a module does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoleRouter, "pays", lambda self, request, prefill, decode: request.num_prompt >= 8)
        patch.setattr(actorllm.fleet.dispatcher, "TRIAL_S", 0.2)
        yield


async def stream(llm: AsyncLLM, number: int, **more: Any) -> list[int]:
    found: list[int] = []
    async for output in llm.generate(PROMPTS[number], params(number, max_tokens=40), **more):
        found = list(output.outputs[0].token_ids)
    return found


async def streams(llm: AsyncLLM) -> list[list[int]]:
    found: dict[int, list[int]] = {}

    async def one(number: int) -> None:
        found[number] = await stream(llm, number)

    async with anyio.create_task_group() as group:
        for number in range(len(PROMPTS)):
            group.start_soon(one, number)
    return [found[number] for number in sorted(found)]


async def transfers(llm: AsyncLLM) -> list[dict[str, Any]]:
    """Of each replica."""
    replicas = (await llm.stats())["scheduler"]["replicas"].values()
    return [replica["scheduler"]["transfers"] for replica in replicas]
