"""Requests of many prompts: other tasks have turns between them, by their number and by the time that they take."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import anyio.lowlevel
import httpx
import orjson
import pytest

from actorllm.server import answer, batch
from actorllm.server.batch import MIN_IDS_THREADED, PORTION, json_of, submitted
from actorllm.server.completions import CompletionShape

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
    assert orjson.loads(await json_of(ids)) == ids


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"prompt": [5] * 200, "echo": True, "logprobs": 1, "stream": True}, "events"),
        ({"prompt": "Once", "n": 140, "stream": True}, "events"),
        ({"prompt": "Once", "max_tokens": 100}, "whole"),
    ],
    ids=["echo", "sequences", "text"],
)
async def test_what_takes_long_to_write_is_written_by_another_thread(
    client: httpx.AsyncClient, fields: dict[str, Any], written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt with its log-probabilities, the beginnings of many sequences, a text in which calls may be looked for."""
    threads: list[int] = []
    write = getattr(CompletionShape, written)

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return write(*arguments)

    monkeypatch.setattr(CompletionShape, written, noted)
    monkeypatch.setattr(answer, "CHARACTERS_PER_ITEM", 2)
    response = await client.post("/v1/completions", json={"max_tokens": 2, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    assert threads[0] != threading.get_ident()


async def test_many_tokens_are_written_by_another_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"prompt": "Once upon a time there was a little girl.", "return_token_strs": True}
    expected = (await client.post("/tokenize", json=asked)).json()
    threads: list[int] = []
    write = batch._written_list
    monkeypatch.setattr(batch, "MIN_IDS_THREADED", 4)
    monkeypatch.setattr(
        batch, "_written_list", lambda values: [threads.append(threading.get_ident()), write(values)][1]
    )
    assert (await client.post("/tokenize", json=asked)).json() == expected
    assert len(threads) == 2
    assert threading.get_ident() not in threads
