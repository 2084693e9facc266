"""Large grammars that are asked for and given up hold up no small one, are not compiled, and do not fill the memory."""

from __future__ import annotations

import anyio
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.text.grammar import MAX_BYTES
from tests.hostile.bystander import bystander
from tests.hostile.grammars import large_tag

pytestmark = pytest.mark.anyio


async def test_a_small_grammar_does_not_wait_for_those_that_were_given_up() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=64) as llm:
        small = SamplingParams(max_tokens=1, seed=3, structured_outputs={"regex": "[a-z]{3}"})
        await llm.complete("One day", small)  # the vocabulary is read
        tags = [SamplingParams(max_tokens=4, structured_outputs=large_tag(number, num_tags=70)) for number in range(24)]
        async with bystander(llm, max_tokens=60) as steady:
            async with anyio.create_task_group() as attack:
                for tag in tags:
                    attack.start_soon(llm.complete, "One day", tag)
                grammars = (await llm.stats())["scheduler"]["grammars"]
                while not grammars["num_waiting"]:
                    await steady.wait(1)
                    grammars = (await llm.stats())["scheduler"]["grammars"]
                other = SamplingParams(max_tokens=1, seed=3, structured_outputs={"regex": "[0-9]{3}"})
                assert await steady.tokens_until_first(params=other) < 150
                attack.cancel_scope.cancel()
            while grammars["num_waiting"] or grammars["num_running"]:
                await steady.wait(1)
                grammars = (await llm.stats())["scheduler"]["grammars"]
            assert grammars["num_dropped"] >= 12
            assert grammars["num_compiled"] < 12
            assert grammars["bytes_in_use"] <= MAX_BYTES
