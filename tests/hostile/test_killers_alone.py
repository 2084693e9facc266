"""Requests that kill processes, where nobody else has tokens: each is found and fails, and the engine goes on."""

from __future__ import annotations

import anyio
import pytest

from tests.hostile.scripted import SCHEDULER, WORKER, end_of_killer, harmless, scripted_engine


@pytest.mark.parametrize(
    ("victim", "num_killers"),
    [
        (WORKER, 8),
        pytest.param(SCHEDULER, 8, marks=pytest.mark.slow(reason="a scheduler dies for each of eight killers")),
        pytest.param(WORKER, 12, marks=pytest.mark.slow(reason="a worker dies for each of twelve killers")),
        pytest.param(SCHEDULER, 12, marks=pytest.mark.slow(reason="a scheduler dies for each of twelve killers")),
    ],
)
async def test_as_many_as_there_are_fail_and_the_engine_works(victim: str, num_killers: int) -> None:
    with scripted_engine() as llm:
        await llm.start()
        ends: list[BaseException | None] = []

        async def one(number: int) -> None:
            ends.append(await end_of_killer(llm, victim, number))

        async with anyio.create_task_group() as tasks:
            for number in range(num_killers):
                tasks.start_soon(one, number)
        assert len(ends) == num_killers
        assert all("died 2 times while" in str(end) for end in ends)
        prompt, params, expected = harmless(1)
        assert (await llm.complete(prompt, params)).outputs[0].token_ids == expected
        health = llm.health()
        assert health.state == "running"
        assert health.num_recoveries <= 2 + 2 * num_killers + num_killers.bit_length()
