"""Thousands of sequences of one prompt: the prompt is computed once, and what all of them take is bounded by the slots."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from actorllm import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from actorllm.errors import EngineOverloaded, InvalidParameterError
from tests.api.becoming_idle import becomes_idle

NUMBER, SLOTS, BLOCK = 2000, 64, 32
PROMPT: Any = {"prompt_token_ids": [5 + 7 * at % 400 for at in range(4 * BLOCK + 1)]}
"""Of four blocks, and one token that each wave computes again for its logits."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_num_seqs": SLOTS, "max_model_len": 256, "block_size": BLOCK,
    "num_gpu_blocks_override": 4 + 2 * SLOTS, "skip_tokenizer_init": True, "max_waiting_requests": 3000,
}  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def siblings(n: int = NUMBER, **arguments: Any) -> SamplingParams:
    return SamplingParams(**({"n": n, "max_tokens": 2, "seed": 1, "ignore_eos": True, "detokenize": False} | arguments))


def streams(output: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


@pytest.fixture(scope="module")
def all_at_once() -> tuple[RequestOutput, dict[str, Any]]:
    """What a new engine makes of all of them, and its counts after that."""
    with LLM("storyteller", topology="inline", **OPTIONS) as llm:
        (output,) = llm.generate([PROMPT], siblings(), use_tqdm=False)
        return output, llm.stats()["scheduler"]["scheduler"]


@pytest.fixture(scope="module")
def expected(all_at_once: tuple[RequestOutput, dict[str, Any]]) -> list[list[int]]:
    return streams(all_at_once[0])


def test_the_prompt_is_computed_once_and_siblings_run_in_waves(
    all_at_once: tuple[RequestOutput, dict[str, Any]],
) -> None:
    """With two blocks for each of the slots, beside those of the prompt."""
    output, counts = all_at_once
    assert [one.index for one in output.outputs] == list(range(NUMBER))
    assert {len(stream) for stream in streams(output)} == {2}
    assert len({tuple(stream) for stream in streams(output)}) > NUMBER // 10, "each draws for itself"
    assert counts["num_prefill_tokens"] <= len(PROMPT["prompt_token_ids"]) + NUMBER, "one token that is computed again"
    assert counts["num_preemptions"] == 0
    assert counts["kv"]["num_free"] == counts["kv"]["num_blocks"]


async def test_abort_ends_those_that_run_and_those_that_wait(expected: list[list[int]]) -> None:
    async with AsyncLLM("storyteller", topology="inline", **OPTIONS) as llm:
        stream = llm.generate(PROMPT, siblings(max_tokens=50), request_id="x")
        await anext(stream)
        await llm.abort("x")
        ended: dict[int, str | None] = {}
        async for output in stream:
            ended |= {one.index: one.finish_reason for one in output.outputs if one.finished()}
        assert len(ended) == NUMBER
        assert set(ended.values()) == {"abort"}
        await becomes_idle(llm)
        few = await llm.complete(PROMPT, siblings(8))
        assert streams(few) == expected[:8], "more siblings change nothing about those that are there"


async def test_more_than_may_wait_are_refused_together() -> None:
    async with AsyncLLM("storyteller", topology="inline", **OPTIONS | {"max_waiting_requests": 1000}) as llm:
        with pytest.raises(InvalidParameterError, match=f"n={NUMBER} sequences are more than this engine ever takes"):
            await llm.complete(PROMPT, siblings())
        first = llm.generate(PROMPT, siblings(1000, max_tokens=50))
        await anext(first)
        with pytest.raises(EngineOverloaded, match="this one has 999 sequences"):
            await llm.complete(PROMPT, siblings(999))
        await first.aclose()
        await becomes_idle(llm)


@pytest.mark.leaks_by_module
async def test_killed_processes_change_no_stream(expected: list[list[int]]) -> None:
    async with AsyncLLM("storyteller", **OPTIONS) as llm:
        found: dict[int, list[int]] = {}
        victims = {NUMBER // 4: "worker0", NUMBER // 2: "scheduler"}
        with anyio.fail_after(120):
            async for output in llm.generate(PROMPT, siblings(output_kind=RequestOutputKind.DELTA)):
                for one in output.outputs:
                    found.setdefault(one.index, []).extend(one.token_ids)
                for number in [number for number in victims if number <= len(found)][:1]:
                    os.kill(llm._engine.pids[victims.pop(number)], signal.SIGKILL)
        assert not victims
        assert [found[index] for index in range(NUMBER)] == expected
