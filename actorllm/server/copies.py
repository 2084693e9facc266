"""How often an answer repeats its prompt, with each of n sequences, and how often a query is read, with each of n documents.

A body of a few kilobytes could ask for gigabytes that way, or for minutes of tokenization. The product is bounded before anything
is computed. Pure; called by the endpoints that repeat prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actorllm.server.envelope import ApiError

MAX_COPIED = 1 << 22
"""Characters that all repetitions in one answer have together."""
CHARACTERS_PER_TOKEN = 4
"""As many a token id counts for."""
ALL_TOKENS = 1 << 12
"""Log-probabilities of a position where those of the whole vocabulary are asked for."""


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
