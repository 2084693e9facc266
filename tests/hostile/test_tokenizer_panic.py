"""Embedding: a prompt on which the tokenizer panics, which is no `Exception` in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.api.llm_engine import LLMEngine
from actorllm.errors import InvalidPromptError
from tests.hostile.bystander import bystander
from tests.hostile.prompts import PANIC, careless_model


async def test_the_panic_is_the_error_of_its_request(tmp_path: Path) -> None:
    model = careless_model(tmp_path)
    async with (
        AsyncLLM(model, topology="inline", num_threads=1) as llm,
        bystander(llm, max_tokens=60) as steady,
    ):
        for _ in range(4):
            with pytest.raises(InvalidPromptError, match="the tokenizer failed on this prompt of 40 characters"):
                await llm.complete(PANIC)
        assert await steady.tokens_until_first() < 100
        health = llm.health()
        assert health.state == "running"
        assert health.threads["intake"].state == "running"
        assert health.threads["intake"].num_restarts == 0
        await llm.check_health()


def test_also_where_the_caller_tokenizes(tmp_path: Path) -> None:
    from actorllm import EngineArgs

    engine = LLMEngine.from_engine_args(EngineArgs(str(careless_model(tmp_path)), topology="inline", num_threads=1))
    with engine:
        with pytest.raises(InvalidPromptError, match="the tokenizer failed"):
            engine.add_request("panic", PANIC, SamplingParams(max_tokens=1))
        engine.add_request("fine", "One day", SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].request_id == "fine"
        assert engine.health().threads == {}
