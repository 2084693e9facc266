"""An attached program that floods the engine with grammars: the owner's are made in turn with them."""

from __future__ import annotations

import uuid

import anyio
import pytest

from actorllm import AsyncLLM, SamplingParams
from tests.hostile.bystander import bystander
from tests.hostile.grammars import large_tag

pytestmark = pytest.mark.anyio


async def test_the_owner_gets_a_large_grammar_beside_the_flood() -> None:
    name = f"flooded-{uuid.uuid4().hex[:8]}"
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1, name=name, max_num_seqs=64) as llm,
        AsyncLLM.attach(name) as guest,
        bystander(llm, max_tokens=60) as steady,
        anyio.create_task_group() as attack,
    ):
        for number in range(20):
            tag = SamplingParams(max_tokens=2, structured_outputs=large_tag(number, num_tags=90))
            attack.start_soon(guest.complete, "One day", tag)
        grammars = (await llm.stats())["scheduler"]["grammars"]
        while grammars["num_waiting"] < 10:
            await steady.wait(1)
            grammars = (await llm.stats())["scheduler"]["grammars"]
        small = SamplingParams(max_tokens=1, structured_outputs={"regex": "[a-z]{3}"})
        assert await steady.tokens_until_first(params=small) < 300
        before = grammars["num_compiled"]
        mine = SamplingParams(max_tokens=2, structured_outputs=large_tag(100, num_tags=40))
        assert (await llm.complete("One day", mine)).outputs[0].token_ids
        grammars = (await llm.stats())["scheduler"]["grammars"]
        assert grammars["num_compiled"] - before <= 5, "it is the owner's turn after the one that runs"
        attack.cancel_scope.cancel()
