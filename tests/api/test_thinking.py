"""Thoughts through the front doors: a budget ends them, and the grammar of the answer begins behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM, LLMEngine, SamplingParams, StructuredOutputsParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, InvalidParameterError
from actorllm.text.reasoning.parsers import Marks

PROMPT = "Once upon a time"
ANSWERS = ["yes", "no"]
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""Of the KV cache."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "max_num_seqs": 32, "seed": 1}
    engine = AsyncLLM("storyteller", dtype="float32", reasoning_parser="deepseek_r1", **options)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def answer(llm: AsyncLLM, **parameters: Any) -> Any:
    params = SamplingParams(**{"max_tokens": 60, "seed": 5, "temperature": 1.0, **parameters})
    return (await llm.complete(PROMPT, params)).outputs


@pytest.mark.anyio
@pytest.mark.parametrize("budget", [0, 1, 12])
async def test_a_budget_ends_the_thought(llm: AsyncLLM, budget: int) -> None:
    """It takes nothing else away: the tokens before are those of a request without one."""
    (free,) = await answer(llm, ignore_eos=True)
    (one,) = await answer(llm, thinking_token_budget=budget, ignore_eos=True)
    end = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
    assert one.token_ids[:budget] == free.token_ids[:budget]
    assert one.token_ids[budget : budget + len(end)] == list(end)
    assert len(one.token_ids) == 60, "the answer goes on behind the thought"


@pytest.mark.anyio
async def test_structured_output_begins_behind_the_thought(llm: AsyncLLM) -> None:
    form = StructuredOutputsParams(choice=ANSWERS)
    several = await answer(llm, structured_outputs=form, thinking_token_budget=8, n=4, logit_bias={0: -100})
    assert len({one.text for one in several}) > 1
    for one in several:
        thought, end, said = one.text.partition("</think>")
        assert (bool(thought), end, said in ANSWERS, one.finish_reason) == (True, "</think>", True, "stop")


@pytest.mark.anyio
async def test_a_prompt_may_say_that_there_is_no_thought(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=ANSWERS))
    output = await llm.complete(PROMPT + "<think>\n\n</think>\n\n", params)
    assert output.outputs[0].text in ANSWERS


@pytest.mark.anyio
async def test_requests_with_and_without_share_a_batch(llm: AsyncLLM) -> None:
    alone = [(await answer(llm, **given))[0].token_ids for given in ({}, {"thinking_token_budget": 3})]
    together: dict[int, Any] = {}

    async def put(number: int, given: dict[str, Any]) -> None:
        together[number] = (await answer(llm, **given))[0].token_ids

    async with anyio.create_task_group() as group:
        for number, given in enumerate(({}, {"thinking_token_budget": 3}) * 3):
            group.start_soon(put, number, given)
    assert [together[number] for number in range(6)] == alone * 3


MARKS = {"reasoning_start_str": "<story>", "reasoning_end_str": "The end.</story>"}


def stories(num_blocks: int) -> tuple[list[tuple[int, ...]], int]:
    """Of requests with budgets, in a cache of so many blocks: their tokens, and how often they were displaced."""
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "seed": 1, "reasoning_config": MARKS}
    memory = num_blocks * 4 * TOKEN_BYTES
    engine = LLMEngine(
        "storyteller", dtype="float32", max_model_len=96, block_size=4, kv_cache_memory_bytes=memory, **options
    )
    for number in range(6):
        params = SamplingParams(max_tokens=60, thinking_token_budget=20 + number, seed=number, ignore_eos=True)
        engine.add_request(str(number), "Once <story>", params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    engine.shutdown()
    ended = [found[str(number)] for number in range(6)]
    assert all("The end.</story>" in one.outputs[0].text for one in ended)
    return [tuple(one.outputs[0].token_ids) for one in ended], sum(one.metrics.num_preemptions for one in ended)


def test_a_thought_goes_on_when_its_request_is_computed_again() -> None:
    roomy, num_displaced = stories(400)
    assert num_displaced == 0
    tight, num_displaced = stories(40)
    assert num_displaced > 0
    assert tight == roomy


def test_other_processes_know_the_marks() -> None:
    config = EngineConfig.from_arguments("storyteller", reasoning_parser="seed_oss", reasoning_config=MARKS)
    assert config.model.marks == Marks("<story>", "The end.</story>", "The end.</story>", True)
    assert EngineConfig.from_json(config.to_json()) == config
    assert EngineConfig.from_json(EngineConfig.from_arguments("storyteller").to_json()).model.marks is None


@pytest.mark.anyio
async def test_what_cannot_be_is_refused() -> None:
    for wrong in ("no_such", "no_such_module:Class"):
        with pytest.raises(ConfigError, match="reasoning_parser"):
            AsyncLLM("storyteller", reasoning_parser=wrong)
    with pytest.raises(ConfigError, match="reasoning_config"):
        AsyncLLM("storyteller", reasoning_config={"reasoning_start_str": "<a>"})
    engine = LLMEngine("storyteller", topology="inline")
    with pytest.raises(InvalidParameterError, match="thinking_token_budget needs an engine that knows a thought"):
        engine.add_request("a", PROMPT, SamplingParams(thinking_token_budget=3))
    engine.shutdown()
