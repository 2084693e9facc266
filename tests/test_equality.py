"""Equality of streams: batching, chunking, depth, preemption and topology change nothing (float32).

Two checks. Every stream is held, token by token, against an oracle that shares no code with the engine's forward: the
logits of `transformers` on the stream itself, and the sampler's definition on top. And all configurations are compared
with one another up to their first difference. A difference counts unless the oracle's margin (the smaller of the two
stages' top-2 gaps of logit plus noise) is below 1e-4 there: rounding may decide such a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from actorllm import LLM, SamplingParams
from actorllm.config import BUNDLED_MODELS

MARGIN = 1e-4
MAX_RATE = 1 / 50_000
NUM_PROMPTS = 48
MAX_TOKENS = 96
MAX_MODEL_LEN = 320
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""In the cache of the storyteller in float32: layers, key and value, heads, width, bytes."""
ENOUGH_TOKENS, TOO_FEW_TOKENS = 8_000, 3_520
"""In the cache, without and with preemptions; also the latter for more than 16 requests at a time."""

Stream = list[int]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 200 tokens, and every kind of sampling."""
    rng = np.random.default_rng(7)
    lengths = [1, 2, 15, 16, 17, 200, *rng.integers(1, 120, NUM_PROMPTS - 6).tolist()]
    prompts = [rng.integers(1, 4096, n).tolist() for n in lengths]
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "top_k": 300, "top_p": 0.9},
        {"temperature": 0.0},
    ]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=1000 + i, **kinds[i % len(kinds)])
        for i in range(NUM_PROMPTS)
    ]
    return prompts, params


@cache
def oracle_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(BUNDLED_MODELS["storyteller"]), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def oracle(prompt: list[int], params: SamplingParams, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """What the definition chooses at every position of this stream, and by what margin."""
    import torch

    from actorllm.model.sampler import Sampler, SamplingColumns

    with torch.inference_mode():
        logits = oracle_model()(torch.tensor([prompt + stream[:-1]])).logits[0, len(prompt) - 1 :].float()
    n = len(stream)
    columns = SamplingColumns(
        temperature=np.full(n, params.temperature, np.float32),
        top_k=np.full(n, params.top_k, np.int32),
        top_p=np.full(n, params.top_p, np.float32),
        min_p=np.full(n, params.min_p, np.float32),
        seeds=np.full(n, params.seed, np.uint64),
        sample_index=np.zeros(n, np.int32),
        token_index=np.arange(n, dtype=np.int32),
    )
    return Sampler(4096).sample_with_margin(logits.contiguous(), columns)


@dataclass
class Account:
    tokens: int = 0
    batched_tokens: int = 0
    """Of runs in which 16 and more were sampled at a time."""
    inside_margin: int = 0
    real: int = 0

    def check(self, prompt: list[int], params: SamplingParams, stream: Stream) -> None:
        """Hold one stream against the oracle on itself."""
        expected, margin = oracle(prompt, params, stream)
        differs = np.array(stream) != expected
        self.tokens += len(stream)
        self.inside_margin += int((differs & (margin < MARGIN)).sum())
        self.real += int((differs & (margin >= MARGIN)).sum())

    def compare(self, prompt: list[int], params: SamplingParams, stream: Stream, reference: Stream) -> None:
        """Hold one stream against that of another configuration, up to the first difference."""
        assert len(stream) == len(reference)
        if stream != reference:
            first = next(i for i, (a, b) in enumerate(zip(stream, reference, strict=True)) if a != b)
            _, margin = oracle(prompt, params, reference[: first + 1])
            if margin[first] < MARGIN:
                self.inside_margin += 1
            else:
                self.real += 1


def run(**arguments: Any) -> tuple[list[Stream], dict[str, Any]]:
    prompts, params = requests()
    with LLM(
        "storyteller", dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=32, num_threads=1, **arguments
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    return [output.outputs[0].token_ids for output in outputs], statistics


@pytest.fixture(scope="module")
def reference() -> list[Stream]:
    """Depth 1, roomy cache, whole prompts: the plainest run."""
    streams, statistics = run(topology="inline", async_scheduling=False)
    assert statistics["num_preemptions"] == 0
    return streams


GRID = [
    (topology, depth, preempt, chunk)
    for topology in ("inline", "process")
    for depth in (1, 2)
    for preempt in (False, True)
    for chunk in (1, 16, 512)
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("topology", "depth", "preempt", "chunk"), GRID)
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
    assert account.real == 0, account
    assert account.inside_margin <= 10, "rows inside the margin are rare"


@pytest.fixture(scope="module")
def totals() -> Iterator[Account]:
    account = Account()
    yield account
    if account.tokens >= len(GRID) * NUM_PROMPTS * MAX_TOKENS:  # the whole grid ran
        assert account.batched_tokens >= 50_000
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
    streams, _ = run(topology="inline")
    monkeypatch.undo()
    prompts, params = requests()
    account = Account()
    for prompt, one, stream in zip(prompts, params, streams, strict=True):
        account.check(prompt, one, stream)
    sampled_share = 5 / 6
    assert account.real > 0.3 * account.tokens * sampled_share
