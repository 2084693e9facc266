"""Six requests that kill processes, among others: the six fail, and every other one gets its tokens."""

from __future__ import annotations

import anyio
import pytest

from tests.hostile.bystander import bystander
from tests.hostile.scripted import SCHEDULER, WORKER, end_of_killer, harmless, scripted_engine

KILLERS = (0, 2, 3, 7, 8, 11)


@pytest.mark.slow(reason="processes die until each killer is found among all requests")
@pytest.mark.parametrize("victim", [WORKER, SCHEDULER])
async def test_only_those_that_kill_fail(victim: str) -> None:
    with scripted_engine() as llm:
        ends: dict[int, BaseException | list[int] | None] = {}

        async def one(number: int) -> None:
            if number in KILLERS:
                ends[number] = await end_of_killer(llm, victim, number)
            else:
                prompt, params, expected = harmless(number)
                ends[number] = (await llm.complete(prompt, params)).outputs[0].token_ids
                assert ends[number] == expected

        async with bystander(llm, max_tokens=100), anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(one, number)
        assert len(ends) == 12
        for number in KILLERS:
            assert "died 2 times while" in str(ends[number])
        assert llm.health().state == "running"
