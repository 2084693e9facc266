"""Embedding: one tenant floods the intake with long texts; the texts of others, short and long, have their turn."""

from __future__ import annotations

import anyio

from actorllm import AsyncLLM, SamplingParams
from tests.hostile.bystander import bystander
from tests.hostile.prompts import LONG, TO_THE_ROOM

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
LARGE = LONG[:600_000]


async def test_each_tenant_has_its_turn() -> None:
    handed_over: list[str] = []

    async def ask(tenant: str, text: str) -> None:
        await llm.complete(text, ONE, tenant=tenant, tokenization_kwargs=TO_THE_ROOM)
        handed_over.append(tenant)

    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1) as llm,
        bystander(llm) as steady,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(12):
            tasks.start_soon(ask, "flood", LARGE)
        while not (await llm.stats())["intake"]["num_busy"]:
            await steady.wait(1)
        tasks.start_soon(ask, "long", LARGE)
        for _ in range(3):
            assert await steady.tokens_until_first(tenant="short") < 100
            assert await steady.tokens_until_first(tenant="flood") < 100, "of the flooding tenant itself"
        assert handed_over.count("flood") < 12, "the flood was over before the others came"
    assert "long" in handed_over[:8]
