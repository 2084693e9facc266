"""An attached program: its prompts are read in its own tokenizer workers, and a bomb of it is nothing to the owner's streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorllm import AsyncLLM
from actorllm.errors import InvalidPromptError
from tests.hostile.bystander import bystander
from tests.hostile.prompts import ENDLESS_TEMPLATE, PANIC, careless_model


async def test_the_owner_does_not_hear_of_it(tmp_path: Path) -> None:
    model = careless_model(tmp_path)
    async with (
        AsyncLLM(model, name="bombed", num_threads=1, intake_timeout_s=2.0) as llm,
        bystander(llm, max_tokens=100) as steady,
        AsyncLLM.attach("bombed") as guest,
    ):
        for _ in range(2):
            with pytest.raises(InvalidPromptError, match="the tokenizer failed"):
                await guest.complete(PANIC)
        with pytest.raises(InvalidPromptError, match="characters"):
            await guest.complete(" " * 11_000_000 + "x")
        with pytest.raises(InvalidPromptError, match="intake_timeout_s"):
            await guest.chat([{"role": "user", "content": "x"}], chat_template=ENDLESS_TEMPLATE).__anext__()
        assert (await guest.stats())["intake"]["num_processes_killed"] == 1
        assert await steady.tokens_until_first() < 100
        stats = (await llm.stats())["intake"]
        assert stats["num_processes_started"] == 0
        assert llm.health().threads["intake"].last_failure is None
