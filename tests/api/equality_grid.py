"""The requests and configurations of the tests of equality, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from actorllm import LLM, SamplingParams
from tests.oracle import Stream

NUM_PROMPTS = 48
NUM_KINDS = 6
"""Of sampling: each sixth request has the same."""
MAX_TOKENS = 96
MAX_MODEL_LEN = 320
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""In the cache of the storyteller in float32: layers, key and value, heads, width, bytes."""
ENOUGH_TOKENS, TOO_FEW_TOKENS = 8_000, 3_520
"""In the cache, without and with preemptions; also the latter for more than 16 requests at a time."""


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
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=1000 + i, **kinds[i % NUM_KINDS])
        for i in range(NUM_PROMPTS)
    ]
    return prompts, params


def run(num_prompts: int = NUM_PROMPTS, **arguments: Any) -> tuple[list[Stream], dict[str, Any]]:
    prompts, params = requests()
    with LLM(
        "storyteller", dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=32, num_threads=1, **arguments
    ) as llm:
        outputs = llm.generate(prompts[:num_prompts], params[:num_prompts], use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    return [output.outputs[0].token_ids for output in outputs], statistics


GRID = [
    (topology, depth, preempt, chunk)
    for topology in ("inline", "process")
    for depth in (1, 2)
    for preempt in (False, True)
    for chunk in (1, 16, 512)
]
