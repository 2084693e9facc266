"""Requests of many prompts: other tasks have turns between them, by their number and by the time that they take."""

from __future__ import annotations

import itertools

import anyio.lowlevel
import orjson
import pytest

from actorllm.server import batch
from actorllm.server.batch import MIN_IDS_THREADED, PORTION, json_of_ids, submitted

pytestmark = pytest.mark.anyio


class Begun:
    def abort(self) -> None:
        """Of a stream that does not exist."""


@pytest.mark.parametrize(("seconds", "num_turns"), [(0, 2), (1, PORTION), (5, 2 * PORTION)])
async def test_slow_prompts_leave_more_turns_to_others(
    seconds: int, num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by so much each time that it is read."""
    turns: list[None] = []
    clock = itertools.count()

    async def checkpoint() -> None:
        turns.append(None)

    monkeypatch.setattr(batch, "PORTION_S", 2)
    monkeypatch.setattr(batch, "now", lambda: next(clock) * seconds)
    monkeypatch.setattr(anyio.lowlevel, "checkpoint", checkpoint)
    assert len(await submitted(["a"] * 2 * PORTION, lambda _: Begun())) == 2 * PORTION
    assert len(turns) == num_turns


@pytest.mark.parametrize("number", [0, 3, MIN_IDS_THREADED, 2 * MIN_IDS_THREADED + 1])
async def test_long_lists_are_written_in_parts(number: int) -> None:
    ids = list(range(number))
    assert orjson.loads(await json_of_ids(ids)) == ids
