"""Embedding: short texts on which a careless tokenizer works for seconds, on threads that cannot be ended."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from actorllm import AsyncLLM
from actorllm.errors import InvalidPromptError
from tests.hostile.bystander import bystander
from tests.hostile.prompts import careless_model, slow_text


@pytest.mark.slow(reason="two limits of seconds have to pass, and the threads have to come back")
async def test_two_are_replaced_and_then_texts_are_read_where_they_can_be_ended(tmp_path: Path) -> None:
    model = careless_model(tmp_path)
    text = slow_text(50)
    async with (
        AsyncLLM(model, topology="inline", num_threads=1, intake_timeout_s=2.0) as llm,
        bystander(llm) as steady,
    ):
        async with anyio.create_task_group() as tasks:
            for tenant in ("a", "b"):
                tasks.start_soon(refused, llm, text, tenant)
            assert await steady.tokens_until_first(tenant="c") < 150
        health = llm.health().threads["intake"]
        assert health.num_restarts == 2
        assert "cannot be ended" in str(health.last_failure)
        stats = (await llm.stats())["intake"]
        assert (stats["num_replaced"], stats["num_timed_out"], stats["num_processes_started"]) == (2, 2, 0)
        await refused(llm, text, "a")
        stats = (await llm.stats())["intake"]
        assert (stats["num_replaced"], stats["num_processes_killed"]) == (2, 1)
        assert await steady.tokens_until_first() < 1500, "of a process that begins"
        await llm.check_health()
        with anyio.fail_after(120):  # they come back in the end: nothing is left behind by this test
            while (await llm.stats())["intake"]["num_stuck"]:
                await steady.wait(10)
        assert llm.health().threads["intake"].state == "running"


async def refused(llm: AsyncLLM, text: str, tenant: str) -> None:
    with pytest.raises(InvalidPromptError, match="took more than intake_timeout_s"):
        await llm.complete(text, tenant=tenant)
