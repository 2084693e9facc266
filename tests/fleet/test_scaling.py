"""A live engine whose number of replicas follows the demand: streams stay the same while it grows and shrinks."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from actorllm import SLO, AsyncLLM
from actorllm.client.metric_families import families_of
from actorllm.errors import ConfigError, InvalidParameterError
from tests.fleet.streams import PROMPTS, all_run, params, until


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 4,
    "max_replicas": 2,
    "standby_worker": False,
    "autoscaling": {"period_s": 0.1, "window_s": 1.0, "shrink_pause_s": 0.2, "grow_after_s": 0.2, "lead_s": 0.2},
}


def numbers(llm: AsyncLLM) -> list[int]:
    return [replica.number for replica in llm.health().replicas]


@pytest.mark.timeout(200)
@pytest.mark.anyio
async def test_the_number_of_replicas_follows_the_demand_and_the_streams_stay_the_same() -> None:
    async with AsyncLLM("storyteller", **OPTIONS) as llm:
        await llm.start()
        alone = await llm.complete(PROMPTS[0], params(1))
        assert numbers(llm) == [0]
        found: list[list[int]] = []

        async def ask(count: int) -> None:
            for _ in range(count):
                output = await llm.complete(PROMPTS[0], params(1), slo=SLO(ttft=5.0))
                found.append(list(output.outputs[0].token_ids))

        # More rows than one replica may have at a time: a second one is wanted, starts, and takes its part.
        is_larger = anyio.Event()

        async def keep_asking() -> None:
            while not is_larger.is_set():
                await ask(1)

        with anyio.fail_after(150):
            async with anyio.create_task_group() as group:
                for _ in range(12):
                    group.start_soon(keep_asking)
                await until(lambda: numbers(llm) == [0, 1])
                await all_run(llm)
                told = await llm.stats()
                is_larger.set()
            assert told["supervisor"]["scaling"]["num_wanted"] == 2
            samples = {family.name: family.samples for family in families_of(told, 100)}
            assert samples["replicas_wanted"] == [("", {}, 2)]
            # One stream is what one replica can do. It may be on the other one when that goes.
            async with anyio.create_task_group() as group:
                group.start_soon(ask, 2)
                await until(lambda: numbers(llm) == [0])
        assert all(tokens == list(alone.outputs[0].token_ids) for tokens in found)
        with pytest.raises(InvalidParameterError, match="num_replicas=3 must be from min_replicas=1 to max_replicas=2"):
            await llm.scale(3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_replicas": 2}, "min_replicas and autoscaling need max_replicas"),
        ({"max_replicas": 2, "min_replicas": 3}, "max_replicas=2 must be from min_replicas=3 to 64"),
        ({"max_replicas": 65}, "max_replicas=65 must be from min_replicas=1 to 64"),
        (
            {"max_replicas": 2, "data_parallel_size": 3},
            "data_parallel_size=3 must be from min_replicas=1 to max_replicas=2",
        ),
        ({"max_replicas": 2, "target_attainment": 1}, "target_attainment=1 must be a share of requests"),
        (
            {"max_replicas": 2, "autoscaling": {"windows_s": 3}},
            "'windows_s' is none of period_s.*did you mean 'window_s'",
        ),
        ({"max_replicas": 2, "autoscaling": "{"}, "autoscaling='{' is no JSON"),
        ({"max_replicas": 2, "autoscaling": {"margin": "x"}}, "autoscaling: margin='x' must be a number"),
        ({"max_replicas": 2, "topology": "inline"}, "max_replicas=2 needs processes"),
    ],
)
def test_bounds_that_are_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        AsyncLLM("storyteller", **given)
