"""Many requests that come at once do not all begin in one turn of the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import anyio
import pytest
import uvloop

from actorllm.server.turnstile import PER_TURN, Turnstile


async def begun_by_turn(cancelled: int = 0) -> tuple[list[int], Counter[int]]:
    """Thirty requests at once: the order in which they begin, and how many do in each turn. cancelled: so many that wait."""
    turns, loop = Turnstile(), asyncio.get_running_loop()
    number = 0
    order: list[int] = []
    by_turn: Counter[int] = Counter()

    def count() -> None:
        nonlocal number
        number += 1
        counting.append(loop.call_soon(count))

    async def request(which: int) -> None:
        await turns.take()
        order.append(which)
        by_turn[number] += 1

    counting = [loop.call_soon(count)]
    tasks = [asyncio.create_task(request(which)) for which in range(30)]
    await asyncio.sleep(0)
    for task in tasks[PER_TURN : PER_TURN + cancelled]:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    counting[-1].cancel()
    return order, by_turn


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_few_begin_in_each_turn_in_the_order_of_their_arrival(factory: object) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        order, by_turn = runner.run(begun_by_turn())
    assert order == list(range(30))
    assert max(by_turn.values()) == PER_TURN


def test_the_places_of_cancelled_requests_are_no_others() -> None:
    order, _ = asyncio.run(begun_by_turn(cancelled=10))
    assert order == [which for which in range(30) if not PER_TURN <= which < PER_TURN + 10]


def test_without_turns_nothing_waits() -> None:
    turns = Turnstile()

    async def all_at_once() -> None:
        for _ in range(3 * PER_TURN):
            await turns.take()

    anyio.run(all_at_once, backend="trio")
