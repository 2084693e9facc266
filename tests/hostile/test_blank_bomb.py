"""Embedding and policies: texts that cannot fit are refused before a tokenizer looks at them."""

from __future__ import annotations

from typing import Any

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import InvalidPromptError
from actorllm.text.chat_template import Conversation
from actorllm.text.tokenizer import Tokenizer
from tests.hostile.bystander import bystander

BOMB = " " * 11_000_000 + "x"


async def test_a_text_that_cannot_fit_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *arguments: Any) -> Any:
        longest.append(len(text))
        return encode(self, text, *arguments)

    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm, bystander(llm) as steady:
        monkeypatch.setattr(Tokenizer, "encode", noted)
        at_most = {"truncate_prompt_tokens": -1}
        for prompt in (BOMB, {"prompt": BOMB}, Conversation.of([{"role": "user", "content": BOMB}])):
            for arguments in ({}, {"tokenization_kwargs": at_most}):
                with pytest.raises(InvalidPromptError, match=r"1100000\d characters, and at most 4194304"):
                    await llm.complete(prompt, **arguments)
        with pytest.raises(
            InvalidPromptError, match="100000 characters and max_model_len is 1024: so many tokens have at most 13299"
        ):
            await llm.complete(" " * 100_000)
        assert await steady.tokens_until_first() < 100
        stats = (await llm.stats())["intake"]
    assert max(longest) < 1000, "it was tokenized"
    assert stats["num_processes_started"] == 0


async def test_the_bound_is_an_argument() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, max_prompt_characters=100) as llm:
        with pytest.raises(InvalidPromptError, match="101 characters, and at most 100 are taken"):
            await llm.complete("a" * 101)
        rendered = Conversation.of([{"role": "user", "content": "a"}], chat_template="{{ 'ab ' * 50 }}")
        with pytest.raises(InvalidPromptError, match="150 characters, and at most 100 are taken"):
            await llm.complete(rendered)
        assert (await llm.complete("a" * 100, SamplingParams(max_tokens=1))).finished
