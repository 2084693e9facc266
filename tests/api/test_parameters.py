"""Parameters that act on logits, and log-probabilities, from `SamplingParams` to `RequestOutput`.

Every stream is held against the logits of `transformers` on the stream itself, with each parameter applied as documented;
and against itself in every other way of running it: depth, preemption, chunked prefill, topology.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from actorllm import LLM, AsyncLLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from actorllm.config import BUNDLED_MODELS, ConfigError
from actorllm.errors import InvalidParameterError
from actorllm.messages.logit_rules import SamplingRules, rules_of
from actorllm.text.tokenizer import Tokenizer
from tests.effort import grid
from tests.oracle import MARGIN, Account, oracle

VOCAB = 4096
PROMPT = "Once upon a time"
GREEDY = [443, 1135, 259, 433, 415, 339]
BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * 16
"""Of the storyteller in float32: layers, key and value, heads, width, bytes, tokens."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1, max_logprobs=-1) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED_MODELS["storyteller"])


def run(llm: LLM, prompt: Any = PROMPT, **arguments: Any) -> RequestOutput:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | arguments
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def complete(llm: LLM, prompt: Any = PROMPT, **arguments: Any) -> CompletionOutput:
    return run(llm, prompt, **arguments).outputs[0]


@cache
def logits_on(ids: tuple[int, ...]) -> np.ndarray:
    """What transformers computes, [len(ids), VOCAB]."""
    import torch
    from transformers import AutoModelForCausalLM

    global _model
    if _model is None:
        _model = AutoModelForCausalLM.from_pretrained(
            str(BUNDLED_MODELS["storyteller"]), dtype=torch.float32, attn_implementation="eager"
        ).eval()
    with torch.inference_mode():
        logits: np.ndarray = _model(torch.tensor([ids])).logits[0].float().numpy()
    return logits


_model: Any = None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


# What they do to a greedy stream --------------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": -1.5},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "frequency_penalty": 2.0, "presence_penalty": -0.5},
    {"logit_bias": {443: -100.0, 308: 1.5}},
    {"allowed_token_ids": list(range(200, 700))},
    {"allowed_token_ids": [i for i in range(VOCAB) if i != 443]},
    {"bad_words": ["there", "man", "three sons", "king"]},
    {"min_tokens": 12, "stop_token_ids": [443, 415]},
    {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {259: -2.0, 270: 1.0},
        "allowed_token_ids": list(range(100, VOCAB)),
        "bad_words": ["lived", "once upon"],
        "min_tokens": 5,
        "stop_token_ids": [415],
        "logprobs": 4,
        "prompt_logprobs": 2,
    },
]


def is_greedy_by_the_book(prompt: list[int], output: list[int], params: SamplingParams, rules: SamplingRules) -> bool:
    """Whether every token is the best of what the parameters leave, or as good as the best."""
    rows = logits_on((*prompt, *output[:-1]))[len(prompt) - 1 :]
    for count, (token, row) in enumerate(zip(output, rows.copy(), strict=True)):
        so_far = output[:count]
        if rules.allowed_ids:
            row[np.setdiff1d(np.arange(VOCAB), rules.allowed_ids)] = -np.inf
        for word in rules.bad_words:
            if len(word) <= count + 1 and so_far[count + 1 - len(word) :] == list(word[:-1]):
                row[word[-1]] = -np.inf
        if count < params.min_tokens:
            row[[0, *(params.stop_token_ids or [])]] = -np.inf
        for i, bias in zip(rules.bias_ids, rules.biases, strict=True):
            row[i] += bias
        for seen in {*prompt, *so_far}:
            row[seen] *= rules.repetition_penalty if row[seen] <= 0 else 1 / rules.repetition_penalty
        for seen in set(so_far):
            row[seen] -= rules.frequency_penalty * so_far.count(seen) + rules.presence_penalty
        if row[token] < row.max() - 1e-3:
            return False
    return True


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v))
def test_a_greedy_stream_is_the_best_of_what_is_left(llm: LLM, tokenizer: Tokenizer, variant: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, **variant)
    output = run(llm, **({"max_tokens": 40} | variant))
    tokens = output.outputs[0].token_ids
    rules = rules_of(params, VOCAB, -1, lambda: tokenizer) or SamplingRules()
    assert is_greedy_by_the_book(output.prompt_token_ids, tokens, params, rules)
    plain = complete(llm, max_tokens=40).token_ids
    assert not is_greedy_by_the_book(output.prompt_token_ids, plain[: len(tokens)], params, rules), "the test can fail"


def test_what_leaves_nothing_ends_its_request_only(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"^allowed_token_ids and min_tokens together leave no token"):
        complete(llm, allowed_token_ids=[443], min_tokens=3, stop_token_ids=[443])
    assert complete(llm, max_tokens=6).token_ids == GREEDY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: 4096 is outside the vocabulary of 4096"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids: 4096 is outside the vocabulary"),
        ({"bad_words": [" "]}, "bad_words: ' ' has no token"),
        ({"logprobs": 5000}, "logprobs=5000 asks for 5000"),
    ],
)
def test_what_only_the_model_can_refuse(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        complete(llm, **arguments)


@pytest.mark.parametrize("value", [-2, 1.5, "20", True, None])
def test_max_logprobs_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_logprobs="):
        LLM("storyteller", max_logprobs=value)


def test_a_repetition_is_an_end_of_its_own(llm: LLM) -> None:
    output = complete(
        llm, max_tokens=30, logit_bias={443: 50.0}, repetition_detection={"max_pattern_size": 2, "min_count": 4}
    )
    assert output.token_ids == [443] * 4
    assert (output.finish_reason, output.stop_reason) == ("repetition", "repetition_detected")
    assert output.text == " there" * 4


# Log-probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 5, -1])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_of_tokens(llm: LLM, num_top: int, temperature: float) -> None:
    result = run(llm, logprobs=num_top, temperature=temperature, seed=3, presence_penalty=1.5)
    output = result.outputs[0]
    expected = log_softmax(logits_on((*result.prompt_token_ids, *output.token_ids[:-1])))[
        len(result.prompt_token_ids) - 1 :
    ]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 12
    for token, entries, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        assert next(iter(entries)) == token
        assert len(entries) in ((VOCAB,) if num_top == -1 else (num_top, num_top + 1))
        rank = int((row >= row[token]).sum())
        assert entries[token].rank == pytest.approx(rank, abs=rank * 1e-3)
        others = [entry for key, entry in entries.items() if key != token]
        assert [e.logprob for e in others] == sorted((e.logprob for e in others), reverse=True)
        ranks = sorted(entry.rank or 0 for entry in entries.values())
        assert ranks[: max(num_top, 0)] == list(range(1, max(num_top, 0) + 1))
        for key, entry in list(entries.items())[:30]:
            assert entry.logprob == pytest.approx(row[key], abs=1e-4)
    total = sum(entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
    assert (
        "".join(e[t].decoded_token or "" for t, e in zip(output.token_ids, output.logprobs, strict=True)) == output.text
    )


def test_who_did_not_ask_gets_none(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with_them, without = llm.generate([PROMPT, PROMPT], [asked, plain], use_tqdm=False)
    assert with_them.outputs[0].logprobs is not None
    assert with_them.prompt_logprobs is None
    assert (without.outputs[0].logprobs, without.outputs[0].cumulative_logprob) == (None, None)


def test_no_text_where_none_is_made(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    mute = SamplingParams(temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1, ignore_eos=True, detokenize=False)
    spoken, silent = llm.generate([PROMPT, PROMPT], [asked, mute], use_tqdm=False)
    for output, is_text in ((spoken, True), (silent, False)):
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        for entries in [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]:
            assert entries is not None
            assert all((entry.decoded_token is not None) == is_text for entry in entries.values())


def test_the_token_at_the_end_and_the_stop_string_have_theirs(llm: LLM) -> None:
    stopped = complete(llm, logprobs=0, stop=["lived a"])
    ended = complete(llm, logprobs=0, stop_token_ids=[259])
    for output in (stopped, ended):
        assert output.token_ids == GREEDY[:3]
        assert output.logprobs is not None
        assert [next(iter(entries)) for entries in output.logprobs] == GREEDY[:3]


@pytest.mark.parametrize("num_top", [0, 3, -1])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_logprobs_of_a_prompt(llm: LLM, num_top: int, length: int) -> None:
    prompt = np.random.default_rng(length).integers(1, VOCAB, length).tolist()
    output = run(llm, prompt, prompt_logprobs=num_top, max_tokens=2)
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == length
    assert found[0] is None
    expected = log_softmax(logits_on(tuple(prompt)))
    for position, entries in enumerate(found[1:], 1):
        row = expected[position - 1]
        assert entries is not None
        assert next(iter(entries)) == prompt[position]
        assert len(entries) in ((VOCAB,) if num_top == -1 else (num_top, num_top + 1))
        for key, entry in list(entries.items())[:30]:
            assert entry.logprob == pytest.approx(row[key], abs=1e-4)
        assert entries[prompt[position]].rank == pytest.approx((row >= row[prompt[position]]).sum(), rel=0.01)


async def test_each_kind_of_output() -> None:
    params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 0}
    llm = AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1)
    try:
        kinds = {}
        for kind in RequestOutputKind:
            stream = llm.generate(PROMPT, SamplingParams(**params, output_kind=kind))
            kinds[kind] = [output async for output in stream]
    finally:
        llm.shutdown()
    (final,) = kinds[RequestOutputKind.FINAL_ONLY]
    assert final.outputs[0].token_ids == GREEDY
    for output in kinds[RequestOutputKind.CUMULATIVE]:
        count = len(output.outputs[0].token_ids)
        assert output.outputs[0].logprobs == (final.outputs[0].logprobs or [])[:count]
        assert output.prompt_logprobs == final.prompt_logprobs
    deltas = kinds[RequestOutputKind.DELTA]
    assert [e for output in deltas for e in output.outputs[0].logprobs or []] == final.outputs[0].logprobs
    assert [e for output in deltas for e in output.prompt_logprobs or []] == final.prompt_logprobs
    assert deltas[-1].outputs[0].cumulative_logprob == pytest.approx(final.outputs[0].cumulative_logprob)


# However they are run -------------------------------------------------------------------------------------------------


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(5)
    kinds: list[dict[str, Any]] = [
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logprobs": 2},
        {"bad_words": ["the", "and", "of the", "to the king"], "prompt_logprobs": 1, "logprobs": 0},
        {"logit_bias": {259: 3.0, 270: -5.0}, "allowed_token_ids": list(range(50, 3000)), "logprobs": 1},
        {"min_tokens": 20, "stop_token_ids": [259, 270, 12], "prompt_logprobs": 0},
        {"frequency_penalty": 1.5, "repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "logprobs": 3},
    ]
    prompts = [rng.integers(1, VOCAB, n).tolist() for n in rng.integers(1, 90, 15)]
    temperatures = [0.0, 1.0, 0.8]
    params = [
        SamplingParams(
            **{"max_tokens": 48, "ignore_eos": True, "seed": i, "temperature": temperatures[i % 3]} | kinds[i % 5]
        )
        for i in range(15)
    ]
    return prompts, params


def run_all(**arguments: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    prompts, params = requests()
    fixed = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 12, "num_threads": 1}
    with LLM("storyteller", **(fixed | arguments)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    assert statistics["kv"]["num_free"] == statistics["kv"]["num_blocks"]
    return outputs, statistics


@pytest.fixture(scope="module")
def reference() -> list[RequestOutput]:
    return run_all(topology="inline", async_scheduling=False)[0]


def are_close(some: Any, others: Any) -> bool:
    """The same tokens in the same order, up to equally likely ones, and close values."""
    if some is None or others is None:
        return some is others
    return all(
        (a is None) == (b is None)
        and (a is None or np.allclose([e.logprob for e in a.values()], [e.logprob for e in b.values()], atol=1e-3))
        and (a is None or next(iter(a)) == next(iter(b)))
        for a, b in zip(some, others, strict=True)
    )


def assert_equal(outputs: list[RequestOutput], reference: list[RequestOutput]) -> None:
    """Every stream is what the definition says of it, and they are those of the reference.

    Where rounding decides a close choice they part: up to there they are equal, and the margin says that it was close.
    """
    account = Account()
    for prompt, params, output, expected in zip(*requests(), outputs, reference, strict=True):
        assert are_close(output.prompt_logprobs, expected.prompt_logprobs)
        got, want = output.outputs[0], expected.outputs[0]
        account.check(prompt, params, got.token_ids)
        pairs = enumerate(zip(got.token_ids, want.token_ids, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is None:
            assert (got.token_ids, got.text) == (want.token_ids, want.text)
            assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
        else:
            _, margin = oracle(prompt, params, want.token_ids[: first + 1])
            assert margin[first] < MARGIN, f"{got.token_ids} and {want.token_ids} part at {first}"
        if want.logprobs is None or got.logprobs is None:
            assert got.logprobs is want.logprobs
        else:
            assert are_close(list(got.logprobs)[:first], list(want.logprobs)[:first])
    assert account.real == 0, account
    assert account.inside_margin <= 2, "rows inside the margin are rare"


def test_a_stream_without_what_was_asked_for_is_found(reference: list[RequestOutput]) -> None:
    """The negative control: of every kind of request, held against parameters that do nothing to logits."""
    real = [0] * 5
    for i, (prompt, params, output) in enumerate(zip(*requests(), reference, strict=True)):
        account = Account()
        plain = SamplingParams(max_tokens=48, ignore_eos=True, seed=params.seed, temperature=params.temperature)
        account.check(prompt, plain, output.outputs[0].token_ids)
        real[i % 5] += account.real
    assert min(real) > 0, real


@pytest.mark.parametrize(
    ("topology", "depth", "preempt", "chunk"), grid(["inline", "process"], [1, 2], [False, True], [7, 512])
)
def test_tokens_and_logprobs_are_equal(
    reference: list[RequestOutput], topology: str, depth: int, preempt: bool, chunk: int
) -> None:
    outputs, statistics = run_all(
        topology=topology,
        async_scheduling=depth == 2,
        long_prefill_token_threshold=chunk,
        kv_cache_memory_bytes=BLOCK_BYTES * (40 if preempt else 500),
    )
    assert (statistics["num_preemptions"] > 0) == preempt
    assert_equal(outputs, reference)


@pytest.mark.parametrize(
    "preempt",
    [pytest.param(False, marks=pytest.mark.slow(reason="two ranks as processes; the other case is harder")), True],
)
def test_two_ranks_apply_them_as_one_does(reference: list[RequestOutput], preempt: bool) -> None:
    """One of them has the logits; both keep the batch, and compute what is told of a prompt."""
    outputs, statistics = run_all(
        tensor_parallel_size=2,
        long_prefill_token_threshold=7 if preempt else 512,
        kv_cache_memory_bytes=BLOCK_BYTES // 2 * (40 if preempt else 500),  # each has one of the two key heads
    )
    assert (statistics["num_preemptions"] > 0) == preempt
    assert_equal(outputs, reference)
