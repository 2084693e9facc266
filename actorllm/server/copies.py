"""How often an answer repeats its prompt, with each of n sequences, and how often a query is read, with each of n documents.

A body of a few kilobytes could ask for gigabytes that way, or for minutes of tokenization. The product is bounded before anything
is computed, and so are the parameters of all prompts, and the vectors of all tokens. Pure; called by the endpoints that repeat
prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from actorllm.intake.tokenization import TextPair
from actorllm.messages.logit_rules import check_ids
from actorllm.server.envelope import ApiError
from actorllm.text.chat_template import Conversation
from actorllm.types.params import SamplingParams, num_bytes

MAX_COPIED = 1 << 22
"""Characters that all repetitions in one answer have together."""
CHARACTERS_PER_TOKEN = 4
"""As many a token id counts for."""
ALL_TOKENS = 1 << 12
"""Log-probabilities of a position where those of the whole vocabulary are asked for."""

MAX_PARAMETERS = 1 << 26
"""Bytes that the parameters of all prompts of a body have together."""

MAX_NUMBERS = 1 << 24
"""Of all vectors of tokens that one answer is made of."""


def check_copies(prompts: Iterable[Any], n: int, field: str, num_logprobs: int | None = None) -> None:
    """prompts: texts, or token ids. field: of the body, that asks for them with each sequence. num_logprobs: shown with
    each token of the prompt.

    Raises ApiError.
    """
    if n == 1:
        return
    number = sum(len(one) if isinstance(one, str) else CHARACTERS_PER_TOKEN * len(one) for one in prompts)
    if num_logprobs is not None:
        number *= 1 + (ALL_TOKENS if num_logprobs < 0 else num_logprobs)
    if number * n > MAX_COPIED:
        what = "characters" if num_logprobs is None else "characters and log-probabilities"
        told = f"{field}: the answer would have n={n} copies of {number} {what}, and the limit is {MAX_COPIED} together"
        raise ApiError(400, f"{told}; ask for fewer sequences at a time", field)


def check_size(num_prompts: int, size: int, field: str) -> None:
    """Of an answer that repeats something for each prompt. field: of the body, that holds the prompts.

    Raises ApiError.
    """
    if num_prompts > 1 and num_prompts * size > MAX_COPIED:
        told = f"{field}: the answer would have {num_prompts} copies of {size} bytes"
        raise ApiError(400, f"{told}, and the limit is {MAX_COPIED} together; send fewer prompts at a time", field)


def check_parameters(num_prompts: int, params: SamplingParams, vocab_size: int, field: str) -> None:
    """Each prompt is a request of its own, which carries all parameters to the scheduler.

    field: of the body, that holds the prompts.

    Raises ApiError, and InvalidParameterError for a token that the model does not have: before the first of many is begun.
    """
    if num_prompts == 1:
        return
    check_ids(params, vocab_size)
    number = num_prompts * num_bytes(params)
    if number > MAX_PARAMETERS:
        told = f"{field}: the parameters of {num_prompts} prompts would take {number} bytes"
        raise ApiError(400, f"{told}, and the limit is {MAX_PARAMETERS} together; send fewer prompts at a time", field)


def check_readings(query: str, num_documents: int, field: str) -> None:
    """A cross-encoder reads the query anew with each document, also where most of it is cut off then.

    field: of the body, that holds the query.

    Raises ApiError.
    """
    if len(query) * (num_documents - 1) > MAX_COPIED:
        told = f"{field}: its {len(query)} characters would be read with each of {num_documents} texts"
        raise ApiError(
            400, f"{told}, and the limit is {MAX_COPIED} together; shorten it, or send fewer at a time", field
        )


def check_vectors(prompts: Sequence[Any], size: int, max_model_len: int, field: str) -> None:
    """Every token has a vector. One prompt is bounded by the model; a text has a token per character at most, or nearly so.

    size: numbers of a vector. field: of the body, that holds the prompts.

    Raises ApiError.
    """
    lengths = (one.num_characters if isinstance(one, TextPair | Conversation) else len(one) for one in prompts)
    number = sum(min(length, max_model_len) for length in lengths) * size
    if len(prompts) > 1 and number > MAX_NUMBERS:
        told = f"{field}: the vectors of all tokens of {len(prompts)} texts may have {number} numbers"
        raise ApiError(400, f"{told}, and the limit is {MAX_NUMBERS} together; send fewer at a time", field)
