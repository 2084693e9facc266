"""Equality of streams: batching, chunking, depth, preemption and topology change nothing (float32).

Two checks. Every stream is held, token by token, against an oracle that shares no code with the engine's forward
(`tests/oracle.py`). And all configurations are compared with one another up to their first difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.equality_grid import (
    ENOUGH_TOKENS,
    GRID,
    MAX_TOKENS,
    NUM_KINDS,
    NUM_PROMPTS,
    TOKEN_BYTES,
    TOO_FEW_TOKENS,
    requests,
    run,
)
from tests.oracle import MAX_RATE, Account, Stream


@pytest.fixture(scope="module")
def reference() -> list[Stream]:
    """Depth 1, roomy cache, whole prompts: the plainest run."""
    streams, statistics = run(topology="inline", async_scheduling=False)
    assert statistics["num_preemptions"] == 0
    return streams


def test_the_grid_is_what_the_readme_says() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    said = re.search(r"(\d+)\s+configurations, ([\d,]+) tokens", readme)
    assert said is not None
    assert (int(said[1]), int(said[2].replace(",", ""))) == (len(GRID), len(GRID) * NUM_PROMPTS * MAX_TOKENS)


QUICK = [
    ("inline", 1, False, 1),
    ("process", 2, True, 1),
    ("process", 1, False, 16),
    ("inline", 2, True, 16),
    ("process", 2, False, 512),
    ("inline", 1, True, 512),
]
"""Any two values of two factors are together in one of them."""


def cells() -> list[Any]:
    slow = pytest.mark.slow(reason="half a minute; the quick cells have each pair of values of two factors")
    return [pytest.param(*cell, marks=[] if cell in QUICK else [slow]) for cell in GRID]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("topology", "depth", "preempt", "chunk"), cells())
def test_streams_are_equal(
    reference: list[Stream], totals: Account, topology: str, depth: int, preempt: bool, chunk: int
) -> None:
    streams, statistics = run(
        topology=topology,
        async_scheduling=depth == 2,
        long_prefill_token_threshold=chunk,
        kv_cache_memory_bytes=TOKEN_BYTES * (TOO_FEW_TOKENS if preempt else ENOUGH_TOKENS),
    )
    assert (statistics["num_preemptions"] > 0) == preempt
    prompts, params = requests()
    account = Account()
    for prompt, one, stream, expected in zip(prompts, params, streams, reference, strict=True):
        account.check(prompt, one, stream)
        account.compare(prompt, one, stream, expected)
    totals.tokens += account.tokens
    if statistics["num_output_tokens"] >= 16 * statistics["num_steps"]:
        totals.batched_tokens += account.tokens
    totals.inside_margin += account.inside_margin
    totals.real += account.real
    assert account.tokens == NUM_PROMPTS * MAX_TOKENS
    assert account.real == 0, account
    assert account.inside_margin <= 10, "rows inside the margin are rare"


@pytest.fixture(scope="module")
def totals() -> Iterator[Account]:
    account = Account()
    yield account
    if account.tokens >= len(QUICK) * NUM_PROMPTS * MAX_TOKENS:  # all quick cells ran
        assert account.batched_tokens >= 0.48 * account.tokens
        assert account.real <= account.tokens * MAX_RATE
        print(
            f"\n{account.tokens} tokens compared, {account.batched_tokens} of them in batches of 16 and more: "
            f"{account.real} real differences, {account.inside_margin} in the margin"
        )


def test_an_off_by_one_in_the_counter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: were noise drawn for the next token index, the comparison would fail."""
    from actorllm.model.sampler import Sampler

    right = Sampler.sample

    def shifted(self: Sampler, logits: Any, columns: Any) -> Any:
        columns.token_index += 1
        try:
            return right(self, logits, columns)
        finally:
            columns.token_index -= 1

    monkeypatch.setattr(Sampler, "sample", shifted)
    streams, _ = run(num_prompts=NUM_KINDS, topology="inline")
    monkeypatch.undo()
    account = Account()
    for prompt, one, stream in zip(*requests(), streams, strict=False):
        account.check(prompt, one, stream)
    assert account.tokens == NUM_KINDS * MAX_TOKENS
    sampled_share = 5 / 6
    assert account.real > 0.3 * account.tokens * sampled_share
