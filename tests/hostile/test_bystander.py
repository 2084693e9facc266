"""The measure of the other tests here: it sees what it is there to see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from actorllm import AsyncLLM, SamplingParams
from tests.hostile.bystander import Bystander, bystander, longest_pause, steps_by_request
from tests.hostile.small_requests import SMALL_PER_TOKEN, Beside


@pytest.mark.parametrize("topology", ["inline", "process"])
async def test_alone_it_has_a_token_in_every_step(topology: Any, tmp_path: Path) -> None:
    record = tmp_path / "run"
    async with (
        AsyncLLM("storyteller", topology=topology, num_threads=1, record=record) as llm,
        bystander(llm, max_tokens=40) as steady,
    ):
        assert await steady.tokens_until_first() < 40
        await steady.wait(60)
    assert longest_pause(record) == 1
    assert len(steps_by_request(record)["bystander-1"]) == 40


async def test_a_pause_is_seen(tmp_path: Path) -> None:
    """Of a request that is preempted for one of higher priority, tokens do not come in every step."""
    record = tmp_path / "run"
    async with AsyncLLM(
        "storyteller", topology="inline", num_threads=1, record=record, max_num_seqs=1, scheduling_policy="priority"
    ) as llm:
        async for _ in llm.generate("x", SamplingParams(max_tokens=1)):
            pass
        steady = Bystander(llm, SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(steady._round)
            await steady.wait(1)
            await llm.complete("One day", SamplingParams(max_tokens=9, ignore_eos=True), priority=-1)
    assert longest_pause(record) >= 9


async def test_other_tokens_are_seen() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
        with pytest.raises(AssertionError, match="other tokens"):
            await _beside_wrong_expectations(llm)


async def _beside_wrong_expectations(llm: AsyncLLM) -> None:
    async with bystander(llm, max_tokens=20) as steady:
        steady.expected = [0] * 20
        await steady.wait(1000)


def test_a_stream_that_stands_still_beside_http_requests_is_seen() -> None:
    steady: Any = SimpleNamespace(num_tokens=0)
    one = Beside(None, cast("Any", None), steady)

    def attack(num_tokens: int) -> None:
        with one.moving():
            one.num_small += 2 * SMALL_PER_TOKEN
            steady.num_tokens += num_tokens

    attack(num_tokens=2)
    with pytest.raises(AssertionError, match="stood still"):
        attack(num_tokens=1)
