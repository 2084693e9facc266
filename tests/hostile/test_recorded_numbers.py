"""A number that is too large for a message fails or is rounded; the scheduler that writes it down lives on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actorllm import SLO, AsyncLLM, SamplingParams
from actorllm.errors import InvalidParameterError

pytestmark = pytest.mark.anyio

LARGE = 10**30


@pytest.mark.parametrize(
    "extras",
    [{"deadline": LARGE}, {"slo": SLO(ttft=LARGE, e2e=2**64)}, {"arrival_time": LARGE}],
    ids=["deadline", "slo", "arrival"],
)
async def test_integers_beyond_64_bits(tmp_path: Path, extras: dict[str, Any]) -> None:
    """Within one process a message is not packed before the recorder packs it."""
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, record=tmp_path / "run") as llm:
        for _ in range(2):
            output = await llm.complete("Once upon a time", SamplingParams(max_tokens=2), **extras)
            assert output.outputs[0].finish_reason == "length"
    assert not (tmp_path / "run.2").exists(), "the scheduler was started again"


def test_an_interval_beyond_32_bits_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="stream_interval=2147483648 must be <= 2147483647"):
        SamplingParams(stream_interval=2**31)
