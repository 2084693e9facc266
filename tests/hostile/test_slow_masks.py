"""A grammar that compiles quickly and takes long for every token holds up nobody: the scheduler makes masks between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import InvalidParameterError, RequestError
from actorllm.text import grammar
from tests.hostile.bystander import bystander, longest_pause


@pytest.mark.parametrize("asked", [{"choice": ["a" * 200_000]}, {"regex": "a" * 200_000}])
async def test_it_is_refused_before_its_first_token(asked: dict[str, Any], tmp_path: Path) -> None:
    record = tmp_path / "run"
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1, record=record) as llm,
        bystander(llm) as steady,
    ):
        with pytest.raises(
            InvalidParameterError, match=r"structured_outputs: a token of it takes \d+ ms of processor time"
        ):
            await llm.complete("One day", SamplingParams(structured_outputs=asked))
        small = SamplingParams(max_tokens=1, structured_outputs={"regex": "[a-z]+"})
        assert await steady.tokens_until_first(params=small) < 100
    assert longest_pause(record) == 1


async def test_one_that_becomes_slow_ends_its_own_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "run"
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, record=record) as llm, bystander(llm):
        await llm.complete("One day", SamplingParams(max_tokens=3, structured_outputs={"regex": "[a-z ]+"}))
        monkeypatch.setattr(grammar, "MAX_MASK_S", 0.0)  # from here on every mask takes long
        monkeypatch.setattr(grammar, "MAX_SLOW_S", 1e-4)
        params = SamplingParams(max_tokens=500, ignore_eos=True, structured_outputs={"regex": "[a-z ]+"})
        # Its first mask may be the one that is too slow: then the grammar is refused as the caller's.
        with pytest.raises(RequestError, match=r"the grammar cannot go on here: its tokens took .* processor time"):
            await llm.complete("One day", params)
    assert longest_pause(record) == 1
