"""Kills under load: nothing is lost, nothing differs, nothing leaks (the fixtures of the suite see to that)."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM
from tests.chaos.harness import MAX_MODEL_LEN, VICTIMS, Chaos

NUM_STOPS = 2
REQUESTS_PER_KILL = 10
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "num_speculative_tokens_per_batch_size": [[1, 100, 5]],
}
"""For any number of rows."""


async def run(engine: AsyncLLM, num_kills: int) -> Chaos:
    chaos = Chaos(engine, seed=1, max_tokens=80)
    async with engine, anyio.create_task_group() as watchers:
        watchers.start_soon(chaos.compare)
        async with anyio.create_task_group() as group:
            group.start_soon(chaos.feed)
            for number in range(num_kills):
                while chaos.num_finished < number * REQUESTS_PER_KILL:
                    await anyio.sleep(0.02)
                # Every fourth time the next kill does not wait until tokens flow again.
                await chaos.kill(VICTIMS[number % 3], in_prefill=bool(number // 3 % 2), is_patient=bool(number % 4))
            for _ in range(NUM_STOPS):
                await chaos.stop("worker", 0.3)
                await chaos.stop("scheduler", 0.3)
            while chaos.num_finished < num_kills * REQUESTS_PER_KILL:
                await anyio.sleep(0.1)
            chaos.stop_feeding()
        watchers.cancel_scope.cancel()
    return chaos


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_kills", "drafts"),
    [
        (6, None),
        pytest.param(30, None, marks=pytest.mark.slow(reason="a minute; six kills have each kind once")),
        pytest.param(
            6, DRAFTS, marks=pytest.mark.slow(reason="tests/api/test_speculation.py has a kill of each process")
        ),
    ],
    ids=["6", "30", "6 with drafts"],
)
def test_kills_lose_nothing_and_change_nothing(num_kills: int, drafts: dict[str, Any] | None) -> None:
    engine = AsyncLLM(
        "storyteller",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        num_threads=1,
        speculative_config=drafts,
        standby_worker=True,  # it imports torch while tokens flow; some kills come before it has
    )
    chaos = anyio.run(run, engine, num_kills)
    chaos.check_finished(only_survivors=True)
    figures = chaos.figures
    table = figures.table()
    print(f"\n{table}")
    assert len(figures.kills) == num_kills
    assert figures.requests >= figures.survivors >= num_kills * REQUESTS_PER_KILL
    assert figures.lost == []
    assert figures.wrong_text == []
    assert figures.account.real == 0, table
    assert figures.account.inside_margin <= figures.account.tokens / 1000, "rows inside the margin are rare"
    assert table["kills with 16 and more running"] >= 0.8 * num_kills
    assert table["kills with some in prefill"] >= num_kills / 4
    assert table["kills with all in decode"] >= num_kills / 4
