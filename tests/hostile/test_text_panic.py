"""A library in Rust that panics while the text of one request is made fails that request, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import RequestFailedError
from actorllm.text.request_text import RequestText
from tests.hostile.bystander import bystander, longest_pause


class PanicException(BaseException):
    """As pyo3 makes one for every library."""


async def test_a_panic_where_text_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push, begin = RequestText.push, RequestText.__init__
    doomed: set[int] = set()

    def begin_doomed(self: RequestText, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **more)
        if more["stop"] == ["doomed"]:
            doomed.add(id(self))

    def push_doomed(self: RequestText, token_ids: Any) -> Any:
        if id(self) in doomed:
            raise PanicException("index out of range")
        return push(self, token_ids)

    monkeypatch.setattr(RequestText, "__init__", begin_doomed)
    monkeypatch.setattr(RequestText, "push", push_doomed)
    record = tmp_path / "run"
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1, record=record) as llm,
        bystander(llm) as steady,
    ):
        with pytest.raises(RequestFailedError, match="index out of range"):
            await llm.complete("One day", SamplingParams(max_tokens=9, ignore_eos=True, stop=["doomed"]))
        doomed.clear()
        assert await steady.tokens_until_first() < 40
    assert longest_pause(record) == 1
