"""A panic of the native library in the thread of a grammar fails the request that asked for it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import InvalidParameterError
from actorllm.text.grammar import GrammarCompiler
from tests.hostile.bystander import bystander

pytestmark = pytest.mark.anyio


class PanicException(BaseException):
    """As pyo3 raises it."""


async def test_a_panic_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    write = GrammarCompiler._grammar_text

    def panics(self: GrammarCompiler, llguidance: Any, grammar: Mapping[str, Any], dropped: list[str]) -> str:
        if grammar["text"] == "panic":
            raise PanicException("index out of bounds")
        return write(self, llguidance, grammar, dropped)

    monkeypatch.setattr(GrammarCompiler, "_grammar_text", panics)
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1) as llm,
        bystander(llm, max_tokens=60) as steady,
    ):
        for _ in range(3):
            with pytest.raises(InvalidParameterError, match="cannot be compiled: PanicException: index out of bounds"):
                await llm.complete("One day", SamplingParams(structured_outputs={"regex": "panic"}))
            small = SamplingParams(max_tokens=1, structured_outputs={"regex": "[a-z]{3}"})
            assert await steady.tokens_until_first(params=small) < 150
