"""What a prompt may be, and what becomes of it before it reaches the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from actorllm import LLM, SamplingParams, TextPrompt, TokensPrompt
from actorllm.client.engine import Engine

PROMPT = "Once upon a time there was a king who had a daughter, and the daughter had a fox. "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    arguments: dict[str, Any] = {"topology": "inline", "num_threads": 1, "block_size": 16}
    with LLM("storyteller", enable_prefix_caching=True, **arguments) as engine:
        yield engine


def hashes(engine: Engine, prompt: Any) -> bytes:
    submit = engine._submits.generating(engine.prompts.tokenize(prompt), SamplingParams(), 1, 0.0, {})(1)
    return bytes(submit.block_hashes)


def test_blocks_are_shared_only_under_the_same_salt(llm: LLM) -> None:
    engine = llm._engine
    ids = engine.prompts.tokenize(PROMPT).ids.tolist()
    plain = hashes(engine, PROMPT)
    assert len(plain) == 32 * (len(ids) // 16) > 0
    assert hashes(engine, {"prompt_token_ids": ids}) == plain
    salted = hashes(engine, {"prompt": PROMPT, "cache_salt": "tenant a"})
    assert salted == hashes(engine, {"prompt_token_ids": ids, "cache_salt": "tenant a"})
    assert {salted[i : i + 32] for i in range(0, len(salted), 32)}.isdisjoint(
        plain[i : i + 32] for i in range(0, len(plain), 32)
    )
    assert hashes(engine, {"prompt": PROMPT, "cache_salt": "tenant b"}) != salted


def test_a_salt_changes_nothing_in_the_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    plain, salted = llm.generate([PROMPT, TextPrompt(prompt=PROMPT, cache_salt="a")], params, use_tqdm=False)
    assert plain.outputs == salted.outputs
    assert salted.prompt == PROMPT
    ids = TokensPrompt(prompt_token_ids=plain.prompt_token_ids, prompt="shown")
    (shown,) = llm.generate(ids, params, use_tqdm=False)
    assert (shown.prompt, shown.outputs) == ("shown", plain.outputs)


def test_keys_of_vllm_that_are_none_ask_for_nothing(llm: LLM) -> None:
    prompt = {"prompt": PROMPT, "multi_modal_data": None, "prompt_embeds": None, "cache_salt": None}
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt == PROMPT
