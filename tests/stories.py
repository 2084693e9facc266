"""Requests of every kind, what their callers get to see, and the comparison with a run in which nothing happened.

A stream must be the same as that of the reference run (float32), token by token, and its text, its log-probabilities and
its end with it; pieces must join without a gap. Where two runs choose differently, the margin of the choice decides: below
1e-4 rounding may (see tests/oracle.py), and the stream is compared up to there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actorllm import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from tests.oracle import MARGIN, oracle

SYSTEM = "Once upon a time there was a little girl who lived near the forest with her mother. She had a red ball and "
STARTS = [
    "One day",
    "The dog",
    "There was a small bird",
    "Tom and Sue",
    "It was",
    "A boy had a big",
    "In the park",
    "Her mom",
]

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 0.8, "stop": [" happy", "er.", "\n"], "min_tokens": 8},
    {"temperature": 1.2, "top_k": 40, "n": 2},
    {"temperature": 0.7, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "ignore_eos": False, "min_tokens": 20, "stop_token_ids": [13]},
    {"temperature": 0.9, "min_p": 0.02, "stream_interval": 7},
    {"temperature": 0.0, "bad_words": ["the"], "logit_bias": {15: 1.0}},
    {"temperature": 1.1, "output_kind": RequestOutputKind.FINAL_ONLY},
    {
        "temperature": 0.6,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "include_stop_str_in_output": True,
        "stop": [". "],
    },
]


@dataclass(frozen=True)
class Request:
    """One of a load."""

    prompt: str
    arguments: dict[str, Any]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.arguments)

    @property
    def has_unknown_rules(self) -> bool:
        """The oracle does not know them."""
        return any(name in ("bad_words", "logit_bias") for name in self.arguments)


def make_requests(count: int, max_tokens: int = 100, first_seed: int = 0) -> list[Request]:
    """All kinds in turn; half of them share a prefix."""
    requests = []
    for number in range(count):
        prompt = (SYSTEM if number % 2 else "") + STARTS[number % len(STARTS)]
        own = {"max_tokens": max_tokens - 7 * (number % 5), "ignore_eos": True, "seed": first_seed + number}
        own["output_kind"] = RequestOutputKind.DELTA
        requests.append(Request(prompt, own | KINDS[number % len(KINDS)]))
    return requests


@dataclass
class Heard:
    """One sequence as its caller has put it together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    reason: tuple[Any, Any] | None = None


@dataclass
class Story:
    """What came of a request."""

    request: Request
    prompt_token_ids: list[int] = field(default_factory=list)
    sequences: list[Heard] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    num_recoveries: int = 0
    error: BaseException | None = None


async def listen(llm: AsyncLLM, request: Request, on_output: Callable[[RequestOutput], object] = bool) -> Story:
    """Take all outputs of a request, as a caller that trusts them would."""
    params = request.params
    story = Story(request, sequences=[Heard() for _ in range(params.n)])
    is_delta = params.output_kind is RequestOutputKind.DELTA
    try:
        async for output in llm.generate(request.prompt, params):
            on_output(output)
            story.prompt_token_ids = output.prompt_token_ids
            if output.prompt_logprobs:
                if is_delta:
                    story.prompt_logprobs += output.prompt_logprobs
                else:
                    story.prompt_logprobs = output.prompt_logprobs
            for one in output.outputs:
                heard = story.sequences[one.index]
                assert heard.reason is None, "something came after the end"
                logprobs = [{t: entry.logprob for t, entry in row.items()} for row in one.logprobs or []]
                if is_delta:
                    heard.token_ids += one.token_ids
                    heard.text += one.text
                    heard.logprobs += logprobs
                else:
                    assert one.token_ids[: len(heard.token_ids)] == heard.token_ids, "what was said has changed"
                    assert one.text.startswith(heard.text), "what was said has changed"
                    heard.token_ids, heard.text, heard.logprobs = one.token_ids, one.text, logprobs
                if one.finish_reason is not None:
                    heard.reason = (one.finish_reason, one.stop_reason)
            if output.finished:
                story.num_recoveries = output.metrics.num_recoveries
    except Exception as error:
        story.error = error
    return story


@dataclass
class Comparison:
    """Counts over any number of stories."""

    num_streams: int = 0
    num_tokens: int = 0
    num_lost: int = 0
    num_inside_margin: int = 0
    differences: list[str] = field(default_factory=list)

    def compare(self, story: Story, reference: Story) -> None:
        if story.error is not None or any(heard.reason is None for heard in story.sequences):
            self.num_lost += 1
            self.differences.append(f"{story.request}: {story.error!r}")
            return
        for index, (heard, expected) in enumerate(zip(story.sequences, reference.sequences, strict=True)):
            self.num_streams += 1
            self.num_tokens += len(heard.token_ids)
            wrong = difference(heard, expected)
            if wrong is None:
                continue
            if self._is_inside_margin(story, index, heard, expected):
                self.num_inside_margin += 1
            else:
                self.differences.append(f"{story.request}, sequence {index}: {wrong}")
        if len(story.prompt_logprobs) != len(reference.prompt_logprobs):
            self.differences.append(f"{story.request}: {len(story.prompt_logprobs)} prompt logprobs")

    @staticmethod
    def _is_inside_margin(story: Story, index: int, heard: Heard, expected: Heard) -> bool:
        params = story.request.params
        first = first_difference(heard.token_ids, expected.token_ids)
        if first is None or story.request.has_unknown_rules:
            return False
        _, margin = oracle(story.prompt_token_ids, params, expected.token_ids[: first + 1], index)
        return bool(margin[first] < MARGIN)


def first_difference(tokens: list[int], others: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)


def difference(heard: Heard, expected: Heard) -> str | None:
    """How two streams differ, if they do."""
    if heard.token_ids != expected.token_ids:
        where = first_difference(heard.token_ids, expected.token_ids)
        return f"tokens differ at {where} of {len(heard.token_ids)} and {len(expected.token_ids)}"
    if heard.text != expected.text:
        return f"text {heard.text!r} instead of {expected.text!r}"
    if heard.reason != expected.reason:
        return f"ended with {heard.reason} instead of {expected.reason}"
    if len(heard.logprobs) != len(expected.logprobs):
        return f"{len(heard.logprobs)} logprobs instead of {len(expected.logprobs)}"
    for row, (got, wanted) in enumerate(zip(heard.logprobs, expected.logprobs, strict=True)):
        if got.keys() != wanted.keys() and min(wanted.values()) - min(got.values()) > 1e-3:
            return f"logprobs of token {row} are {got} instead of {wanted}"
        if any(not math.isclose(got[t], wanted[t], abs_tol=1e-3) for t in got.keys() & wanted.keys()):
            return f"logprobs of token {row} are {got} instead of {wanted}"
    return None
