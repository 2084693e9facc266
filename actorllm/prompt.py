"""Prompts with a name and a type: vLLM's mappings, for programs that build them and for type checkers.

A plain string or list of ids says the same as one of these without further keys. `actorllm.engine` reads them.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str | None]
    """Requests share cached blocks only with those of the same salt."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    """The text that the ids came from, if there is one: it is shown in the output."""
    cache_salt: NotRequired[str | None]
    """Requests share cached blocks only with those of the same salt."""
