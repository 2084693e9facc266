"""n > 1 on real models: the prompt is computed once, and every sequence is the one that its sample index alone would give.

Each stream is held, token by token, against the logits of `transformers` on itself and the sampler's definition with its
sample index (`tests/oracle.py`): neither knows of forks. Then the configurations are compared with one another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from tests.oracle import MARGIN, oracle

LENGTHS = [1, 31, 32, 33, 64, 70, 150]
"""Around the ends of blocks of 32 tokens."""
NUMBERS = [2, 6, 4, 3, 5, 2, 4]
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 40},
]
MAX_TOKENS = 40
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""In the cache of the storyteller in float32: layers, key and value, heads, width, bytes."""


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 4096, length).tolist() for length in LENGTHS]
    params = [
        SamplingParams(n=n, max_tokens=MAX_TOKENS, ignore_eos=True, seed=50 + i, **KINDS[i % 3])
        for i, n in enumerate(NUMBERS)
    ]
    return prompts, params


def run(**arguments: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    given = {"topology": "inline", "max_num_seqs": 32, "block_size": 32} | arguments
    with LLM("storyteller", dtype="float32", max_model_len=320, num_threads=1, **given) as llm:
        outputs = llm.generate(*requests(), use_tqdm=False)
        return outputs, llm.stats()["scheduler"]["scheduler"]


def streams_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def reference() -> list[list[list[int]]]:
    """The streams of the plainest run, each of them checked against the oracle."""
    outputs, statistics = run(async_scheduling=False)
    assert statistics["num_prefill_tokens"] == sum(LENGTHS), "no prompt is computed twice"
    assert statistics["num_forks"] == sum(NUMBERS) - len(NUMBERS)
    streams = streams_of(outputs)
    num_inside = 0
    for prompt, params, siblings in zip(*requests(), streams, strict=True):
        assert len({tuple(stream) for stream in siblings}) == params.n
        for index, stream in enumerate(siblings):
            expected, margin = oracle(prompt, params, stream, index)
            differs = np.array(stream) != expected
            assert not (differs & (margin >= MARGIN)).any()
            num_inside += int(differs.sum())
    assert num_inside <= 5
    return streams


def compare(streams: list[list[list[int]]], reference: list[list[list[int]]]) -> None:
    """Up to the first difference of each, which must lie where rounding may decide."""
    num_inside = 0
    for prompt, params, siblings, others in zip(*requests(), streams, reference, strict=True):
        for index, (stream, other) in enumerate(zip(siblings, others, strict=True)):
            assert len(stream) == len(other)
            if stream != other:
                first = next(i for i, (a, b) in enumerate(zip(stream, other, strict=True)) if a != b)
                _, margin = oracle(prompt, params, other[: first + 1], index)
                assert margin[first] < MARGIN
                num_inside += 1
    assert num_inside <= 2


ROOMY: list[dict[str, Any]] = [
    {},
    {"enable_prefix_caching": False},
    {"long_prefill_token_threshold": 16},
    {"long_prefill_token_threshold": 32, "async_scheduling": False, "enable_prefix_caching": False},
    {"block_size": 16, "max_num_batched_tokens": 48},
    {"topology": "process"},
    {"model_impl": "transformers"},
]


@pytest.mark.parametrize("arguments", ROOMY, ids=str)
def test_every_prompt_is_computed_once_and_nothing_else_changes(
    reference: list[list[list[int]]], arguments: dict[str, Any]
) -> None:
    outputs, statistics = run(**arguments)
    compare(streams_of(outputs), reference)
    assert statistics["num_prefill_tokens"] == sum(LENGTHS)
    assert statistics["num_forks"] == sum(NUMBERS) - len(NUMBERS)
    assert [output.num_cached_tokens for output in outputs] == [0] * len(LENGTHS)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_without_room_for_all_of_them(reference: list[list[list[int]]], depth: int, caching: bool) -> None:
    """Preemptions, and siblings that have to compute the prompt for themselves."""
    outputs, statistics = run(
        async_scheduling=depth == 2,
        enable_prefix_caching=caching,
        max_num_seqs=12,
        kv_cache_memory_bytes=TOKEN_BYTES * 640,
        long_prefill_token_threshold=64,
    )
    assert statistics["num_preemptions"] > 0
    assert 0 < statistics["num_forks"] < sum(NUMBERS) - len(NUMBERS)
    compare(streams_of(outputs), reference)
    assert statistics["kv"]["num_free"] == statistics["kv"]["num_blocks"]


def test_the_engine_that_its_caller_steps(reference: list[list[list[int]]]) -> None:
    engine = LLMEngine.from_engine_args(
        EngineArgs("storyteller", dtype="float32", max_model_len=320, topology="inline", num_threads=1, max_num_seqs=32)
    )
    try:
        for i, (prompt, params) in enumerate(zip(*requests(), strict=True)):
            engine.add_request(str(i), prompt, params)
        last = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                last.setdefault(output.request_id, {}).update({c.index: list(c.token_ids) for c in output.outputs})
        assert engine.stats()["scheduler"]["scheduler"]["num_prefill_tokens"] == sum(LENGTHS)
    finally:
        engine.shutdown()
    compare([[last[str(i)][index] for index in range(n)] for i, n in enumerate(NUMBERS)], reference)


def test_rules_and_logprobs_are_those_of_each_sequence() -> None:
    """Also held against the same engine without a slot for any fork; the prompt's log-probabilities come once."""
    prompt = requests()[0][5]
    params = SamplingParams(
        n=4,
        max_tokens=24,
        seed=9,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        min_tokens=5,
        logit_bias={300: 3.0},
        bad_words=["the"],
    )
    found = []
    for max_num_seqs in (4, 1):
        with LLM(
            "storyteller",
            dtype="float32",
            topology="inline",
            num_threads=1,
            max_num_seqs=max_num_seqs,
            max_model_len=320,
        ) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            statistics = llm.stats()["scheduler"]["scheduler"]
        found.append(output)
        assert statistics["num_forks"] == (3 if max_num_seqs == 4 else 0)
        cached = 0 if max_num_seqs == 4 else 3 * 64  # each finds the full blocks that the first has left
        assert statistics["num_prefill_tokens"] == len(prompt) * (1 if max_num_seqs == 4 else 4) - cached
    forked, alone = found
    assert len(forked.prompt_logprobs) == len(prompt)
    assert [sorted(p or ()) for p in forked.prompt_logprobs] == [sorted(p or ()) for p in alone.prompt_logprobs]
    for one, other in zip(forked.outputs, alone.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.logprobs) == 24
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert list(a) == list(b)
            assert [p.logprob for p in a.values()] == pytest.approx([p.logprob for p in b.values()], abs=1e-4)


def test_two_ranks(tmp_path: Path) -> None:
    """Rank 0 samples, and the other one keeps the same batch."""
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 331,
        "hidden_size": 48,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    prompts = [[i + 1] * length for i, length in enumerate((3, 32, 45, 64))]
    params = [SamplingParams(n=3, seed=i, max_tokens=24, ignore_eos=True) for i in range(4)]
    found = []
    for size in (1, 2):
        with LLM(
            tmp_path,
            load_format="dummy",
            skip_tokenizer_init=True,
            num_threads=1,
            max_num_seqs=12,
            tensor_parallel_size=size,
            topology="process" if size > 1 else "inline",
        ) as llm:
            found.append(streams_of(llm.generate(prompts, params, use_tqdm=False)))
            statistics = llm.stats()["scheduler"]["scheduler"]
        assert statistics["num_forks"] == 8
        assert statistics["num_prefill_tokens"] == 3 + 32 + 45 + 64
    assert found[0] == found[1]
