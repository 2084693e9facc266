"""A grammar that reaches the limits of its lexer: the error names it, and who asks for the same one next is not harmed by that."""

from __future__ import annotations

from typing import Any

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import InvalidParameterError, RequestFailedError
from actorllm.text import grammar
from tests.hostile.bystander import bystander

pytestmark = pytest.mark.anyio

GREEDY = {"regex": "(.*[aeiou].{40}[xyz].*)&(.*)"}
"""Its automaton grows with every token."""


async def test_limits_in_the_middle_and_at_the_first_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 3000)
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm, bystander(llm, max_tokens=60):
        params = SamplingParams(max_tokens=200, seed=1, structured_outputs=GREEDY)
        for _ in range(2):  # the second one is not stopped by what the first has used up
            with pytest.raises(
                RequestFailedError, match=r"structured_outputs: the grammar cannot go on here: .*states"
            ):
                await llm.complete("One day", params)
        monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 5)
        with pytest.raises(InvalidParameterError, match=r"structured_outputs: .*states"):
            await llm.complete("One day", SamplingParams(structured_outputs={"regex": ".{3}[a-z]{40}x"}))


NESTED = "(a{1000}){1000}{1000}"
"""A short text of many states. Its first mask is made, and reading the token that this allows reaches the limit."""


@pytest.mark.parametrize(
    "grammar",
    [{"regex": NESTED}, {"grammar": f"start: /{NESTED}/"}, {"json": {"type": "string", "pattern": f"^{NESTED}$"}}],
)
async def test_a_limit_behind_the_first_mask_is_an_invalid_parameter(grammar: dict[str, Any]) -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
        with pytest.raises(InvalidParameterError, match=r"structured_outputs: .*too many expressions"):
            await llm.complete("One day", SamplingParams(structured_outputs=grammar))


async def test_branches_that_overlap_are_refused_in_words_of_the_schema() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
        with pytest.raises(InvalidParameterError, match=r"structured_outputs: oneOf .* say anyOf") as caught:
            await llm.complete("One day", SamplingParams(structured_outputs={"json": schema}))
    assert "coerce" not in str(caught.value)
