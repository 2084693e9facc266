"""What a stream of the storyteller must be, told by code that shares nothing with the engine's forward.

The logits come from `transformers` (float32, eager attention) on the stream itself, penalties are counted here, and the
choice is the sampler's definition (docs/sampling.md). A position differs for real unless its margin (the smaller of the two
stages' top-2 gaps of logit plus noise) is below MARGIN, or the choice hangs on who is at the border of top_k, top_p or min_p:
rounding may decide such a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np

from actorllm import SamplingParams
from actorllm.config import BUNDLED_MODELS

MARGIN = 1e-4
MAX_RATE = 1 / 50_000
EOS = 0
MOST_ANSWERS = 1024
"""Remembered by `oracle`."""

Stream = list[int]


@cache
def oracle_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # the model is small: two threads would mostly wait for each other
    return AutoModelForCausalLM.from_pretrained(
        str(BUNDLED_MODELS["storyteller"]), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def oracle(
    prompt: Sequence[int], params: SamplingParams, stream: Stream, sample_index: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """What the definition chooses at every position of this stream, and by what margin: int [n], float [n], read-only.

    The border of the filters is looked at where the stream differs, and at its last position. What was asked lately is
    remembered: the answer depends on the arguments alone, and most configurations give the same streams.
    """
    key = (tuple(prompt), repr(params), tuple(stream), sample_index)
    if key not in _answers:
        if (
            len(_answers) >= MOST_ANSWERS
        ):  # some 9 KiB each: half an hour of other streams would look like a leak of the engine
            del _answers[next(iter(_answers))]
        _answers[key] = _choices(prompt, params, stream, sample_index)
        for array in _answers[key]:
            array.setflags(write=False)
    return _answers[key]


_answers: dict[tuple[tuple[int, ...], str, tuple[int, ...], int], tuple[np.ndarray, np.ndarray]] = {}


def _choices(
    prompt: Sequence[int], params: SamplingParams, stream: Stream, sample_index: int
) -> tuple[np.ndarray, np.ndarray]:
    import torch

    from actorllm.model.sampler import Sampler, SamplingColumns

    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *stream[:-1]]])
        logits = oracle_model()(ids).logits[0, len(prompt) - 1 :].float().contiguous()
    n = len(stream)
    _apply_rules(logits.numpy(), prompt, params, stream)
    columns = SamplingColumns(
        temperature=np.full(n, params.temperature, np.float32),
        top_k=np.full(n, max(0, params.top_k), np.int32),
        top_p=np.full(n, params.top_p, np.float32),
        min_p=np.full(n, params.min_p, np.float32),
        seeds=np.full(n, params.seed, np.uint64),
        sample_index=np.full(n, sample_index, np.int32),
        token_index=np.arange(n, dtype=np.int32),
    )
    expected, margin = Sampler(4096).sample_with_margin(logits, columns)
    rows = np.union1d(np.flatnonzero(np.array(stream) != expected), [n - 1])
    margin[rows[hangs_on_a_border(logits[rows], columns, rows, expected[rows])]] = 0
    return expected, margin


def hangs_on_a_border(logits: Any, columns: Any, rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Whether these rows would choose otherwise if their filters kept a little more, or a little less: bool [num_rows].

    The border moves by MARGIN: of the logits for top_k and min_p, of the probability for top_p. logits: of the rows.
    """
    from actorllm.model.sampler import Sampler, SamplingColumns

    vocab_size = logits.shape[1]
    temperature, top_k = columns.temperature[rows], columns.top_k[rows]
    best = -np.partition(-logits.numpy(), min(int(top_k.max()), vocab_size - 1), axis=1)
    best = -np.sort(-best[:, : int(top_k.max()) + 1], axis=1) / np.where(temperature > 0, temperature, 1)[:, None]
    has_rank = (top_k > 0) & (top_k < vocab_size)
    at = np.flatnonzero(has_rank)
    is_close = np.zeros(len(rows), bool)
    is_close[at] = best[at, top_k[at] - 1] - best[at, top_k[at]] < MARGIN
    found = np.zeros(len(rows), bool)
    for more in (1, -1):
        moved = SamplingColumns(
            temperature=temperature,
            top_k=np.where(is_close, np.maximum(top_k + more, 1), top_k).astype(np.int32),
            top_p=np.where(columns.top_p[rows] < 1, np.clip(columns.top_p[rows] + more * MARGIN, 1e-9, 1), 1).astype(
                "f4"
            ),
            min_p=np.minimum(columns.min_p[rows] * np.exp(-more * MARGIN), 1).astype(np.float32),
            seeds=columns.seeds[rows],
            sample_index=columns.sample_index[rows],
            token_index=columns.token_index[rows],
        )
        found |= Sampler(vocab_size).sample(logits, moved) != expected
    return found


@cache
def _tokens_of(word: str) -> tuple[tuple[int, ...], ...]:
    """The sequences that a bad word is kept away by: as it is, and within a text."""
    from actorllm.messages.logit_rules import SamplingRules, rules_of
    from actorllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(BUNDLED_MODELS["storyteller"])
    rules = rules_of(SamplingParams(bad_words=[word]), 4096, -1, lambda: tokenizer) or SamplingRules()
    return rules.bad_words


def _apply_rules(logits: np.ndarray, prompt: Sequence[int], params: SamplingParams, stream: Stream) -> None:
    """Biases, what is allowed, penalties and min_tokens, one position after the other, as OpenAI and vLLM define them."""
    counts = np.zeros(logits.shape[1], np.float32)
    seen = np.zeros(logits.shape[1], bool)
    seen[list(prompt)] = True
    biases: Any = params.logit_bias or {}
    allowed: Any = params.allowed_token_ids or range(logits.shape[1])
    forbidden = np.setdiff1d(np.arange(logits.shape[1]), allowed)
    words = [tokens for word in cast("list[str]", params.bad_words or []) for tokens in _tokens_of(word)]
    for at, (row, token) in enumerate(zip(logits, stream, strict=True)):
        row[list(biases)] += np.array(list(biases.values()), np.float32)
        row[forbidden] = -np.inf
        for tokens in words:
            if len(tokens) <= at + 1 and stream[at + 1 - len(tokens) : at] == list(tokens[:-1]):
                row[tokens[-1]] = -np.inf
        if params.repetition_penalty != 1.0:
            scaled = np.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            row[:] = np.where(seen, scaled, row)
        row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if counts.sum() < params.min_tokens:
            row[[EOS, *params.stop_token_ids]] = -np.inf
        counts[token] += 1
        seen[token] = True


@dataclass
class Account:
    """What was compared, and with what result."""

    tokens: int = 0
    batched_tokens: int = 0
    """Of runs in which 16 and more were sampled at a time."""
    inside_margin: int = 0
    real: int = 0

    def check(self, prompt: Sequence[int], params: SamplingParams, stream: Stream, sample_index: int = 0) -> None:
        """Hold one stream against the oracle on itself."""
        expected, margin = oracle(prompt, params, stream, sample_index)
        differs = np.array(stream) != expected
        self.tokens += len(stream)
        self.inside_margin += int((differs & (margin < MARGIN)).sum())
        self.real += int((differs & (margin >= MARGIN)).sum())

    def compare(self, prompt: Sequence[int], params: SamplingParams, stream: Stream, reference: Stream) -> None:
        """Hold one stream against that of another configuration, up to the first difference."""
        assert len(stream) == len(reference)
        if stream != reference:
            first = next(i for i, (a, b) in enumerate(zip(stream, reference, strict=True)) if a != b)
            _, margin = oracle(prompt, params, reference[: first + 1])
            if margin[first] < MARGIN:
                self.inside_margin += 1
            else:
                self.real += 1
