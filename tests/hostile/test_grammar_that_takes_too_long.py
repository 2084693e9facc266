"""A grammar that takes longer to compile than the limit is an invalid parameter then, and others go on beside its thread."""

from __future__ import annotations

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.actors import constraints
from actorllm.errors import InvalidParameterError
from tests.hostile.bystander import bystander
from tests.hostile.grammars import slow_schema

pytestmark = pytest.mark.anyio


async def test_its_thread_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "COMPILE_TIMEOUT_S", 0.1)
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
        slow = SamplingParams(max_tokens=4, structured_outputs=slow_schema(1500))
        async with bystander(llm, max_tokens=60) as steady:
            with pytest.raises(
                InvalidParameterError, match=r"structured_outputs: it takes longer than 0.1 s to compile"
            ):
                await llm.complete("One day", slow)
            grammars = (await llm.stats())["scheduler"]["grammars"]
            assert grammars["num_timeouts"] == 1
            small = SamplingParams(max_tokens=1, structured_outputs={"regex": "[a-z]{3}"})
            assert await steady.tokens_until_first(params=small) < 150
            while grammars["num_abandoned"]:
                await steady.wait(1)
                grammars = (await llm.stats())["scheduler"]["grammars"]
