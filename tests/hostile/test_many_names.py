"""A client that writes another word into every field of every request: nothing of it is kept, and no metric has it as a label."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from actorllm import SLO, AsyncLLM, SamplingParams, TokensPrompt
from actorllm.actors.topology import ATTACHED
from actorllm.server.board import LAG_BOUNDS
from actorllm.server.metrics import render
from tests.hostile.bystander import bystander

NUM = 120
LAG = {"counts": [0] * (len(LAG_BOUNDS) + 1), "sum": 0.0}


async def metrics(llm: AsyncLLM) -> str:
    return render(await llm.stats(), "storyteller", 1024, LAG).decode()


async def test_a_flood_of_names_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.scheduling.policy_monitor.MAX_OBJECTIVES", 30)
    monkeypatch.setattr("actorllm.client.submit.MAX_OBJECTIVES", 30)
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=8) as llm,
        bystander(llm, max_tokens=60) as steady,
    ):
        before = await metrics(llm)

        async def send(number: int) -> None:
            word = f"word{number}"
            prompt = TokensPrompt(prompt_token_ids=list(range(10, 50)), cache_salt=word)
            params = SamplingParams(max_tokens=1, stop=[word], ignore_eos=True)
            slo = SLO(ttft=1000.0 + number)
            await llm.complete(prompt, params, request_id=word, tenant=word, type_info=word, slo=slo, priority=number)

        async with anyio.create_task_group() as tasks:
            for number in range(NUM):
                tasks.start_soon(send, number)
        actor: Any = llm._engine._supervisor._actors["scheduler"]  # type: ignore[union-attr]
        scheduler = actor.scheduler
        assert len(scheduler._table.alive) <= 1
        assert len(scheduler.policy._order) <= 1 + 64
        assert len(scheduler._admission._queues) == 1
        assert len(actor._watch._seen) <= 30
        assert len(llm._engine._submits._objectives) <= 30
        assert len(llm._engine._streams) <= 2
        after = await metrics(llm)
        assert "word" not in after
        assert {line.split(" ")[0] for line in after.splitlines()} == {
            line.split(" ")[0] for line in before.splitlines()
        }
        assert await steady.tokens_until_first() < 60


async def test_programs_that_come_and_go_make_no_labels() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
        await llm.complete("x", SamplingParams(max_tokens=1))
        stats = await llm.stats()
    links = stats["scheduler"]["links"]
    own = dict(links)
    for number, fill in ((3, 0.25), (17, 0.75), (1234, 0.5)):
        links[f"{ATTACHED}{number}"] = {**own["frontend"], "fill": fill, "fill_received": 0.0}
    fills = [line for line in render(stats, "m", 1024, LAG).decode().splitlines() if "link_fill_perc{" in line]
    assert len(fills) == 2 * (len(own) + 1)
    assert sum("1234" in line for line in fills) == 0
    assert next(line for line in fills if 'peer="attached"' in line and "sent" in line).endswith(" 0.75")
