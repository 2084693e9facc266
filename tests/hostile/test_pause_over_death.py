"""A pause that waits for what has started, while the scheduler dies: everything that had started finishes, and nothing else.

As started counts what had a slot when a scheduler took the pause, and under the next one, if none took it, what had a token.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM
from tests.hostile.scripted import counts_of, harmless, scripted_engine

NUM_SLOTS = 1
"""A second request might find both steps in flight taken by the first one, and would not begin."""


async def until(is_true: Any) -> None:
    while not is_true():
        await anyio.sleep(0.001)


async def kill_scheduler(llm: AsyncLLM) -> None:
    """Returns when another one is on its way."""
    pid = llm._engine.pids["scheduler"]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: llm._engine.pids.get("scheduler", pid) != pid)


@pytest.mark.parametrize("num_kills", [1, 3])
async def test_what_had_started_finishes_before_the_pause_is_told(num_kills: int) -> None:
    """Also a request of which no token had come: the worker is stopped, so that everything is in the middle of its first step."""
    with scripted_engine(max_num_seqs=NUM_SLOTS, heartbeat_timeout_s=300.0) as llm:
        await llm.start()
        worker = llm._engine.pids["worker0"]
        ends: dict[int, list[int]] = {}
        order: list[Any] = []

        async def one(number: int) -> None:
            prompt, params, expected = harmless(number)
            ends[number] = (await llm.complete(prompt, params)).outputs[0].token_ids
            order.append(number)
            assert ends[number] == expected

        async def pause() -> None:
            await llm.pause_generation(mode="wait")
            order.append("paused")

        async with anyio.create_task_group() as tasks:
            os.kill(worker, signal.SIGSTOP)
            try:
                for number in range(NUM_SLOTS):
                    tasks.start_soon(one, number)
                while (await counts_of(llm))["num_running"] < NUM_SLOTS:
                    await anyio.sleep(0.001)
                tasks.start_soon(one, NUM_SLOTS)  # there is no slot for this one
                while not (await counts_of(llm))["num_waiting"]:
                    await anyio.sleep(0.001)
                tasks.start_soon(pause)
                while not await llm.is_paused():
                    await anyio.sleep(0.001)
                for _ in range(num_kills):
                    await kill_scheduler(llm)
                assert "paused" not in order
            finally:
                os.kill(worker, signal.SIGCONT)
            await until(lambda: "paused" in order)
            assert sorted(order[:-1]) == list(range(NUM_SLOTS))
            assert order[-1] == "paused"
            assert await llm.is_paused()
            await llm.resume_generation()
        assert len(ends) == NUM_SLOTS + 1


async def test_a_pause_that_the_dead_scheduler_did_not_take_leaves_waiting_what_had_no_token() -> None:
    """Nothing is lost by that: it is answered after the pause. The scheduler is stopped before it can take the pause."""
    with scripted_engine(max_num_seqs=NUM_SLOTS, heartbeat_timeout_s=300.0) as llm:
        await llm.start()
        worker, scheduler = llm._engine.pids["worker0"], llm._engine.pids["scheduler"]
        order: list[Any] = []

        async def one() -> None:
            prompt, params, expected = harmless(0)
            assert (await llm.complete(prompt, params)).outputs[0].token_ids == expected
            order.append("answered")

        async def pause() -> None:
            await llm.pause_generation(mode="wait")
            order.append("paused")

        async with anyio.create_task_group() as tasks:
            os.kill(worker, signal.SIGSTOP)
            try:
                tasks.start_soon(one)
                while not (await counts_of(llm))["num_running"]:
                    await anyio.sleep(0.001)
                os.kill(scheduler, signal.SIGSTOP)
                tasks.start_soon(pause)
                await until(lambda: llm._engine._frontend._pause_mode == "wait")
                await kill_scheduler(llm)
            finally:
                os.kill(worker, signal.SIGCONT)
            await until(lambda: order)
            assert order == ["paused"]
            counts = await counts_of(llm)
            assert (counts["num_running"], counts["num_waiting"]) == (0, 1)
            await llm.resume_generation()
        assert order == ["paused", "answered"]
