"""Prompts with a name and a type: vLLM's mappings, for programs that build them and for type checkers.

A plain string or list of ids says the same as one of these without further keys. `actorllm.intake.tokenization` reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict

if TYPE_CHECKING:
    import torch


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


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, for an engine with enable_prompt_embeds=True."""

    prompt_embeds: torch.Tensor
    """[num_tokens, hidden_size], of any floating-point type, as transformers takes for inputs_embeds."""
    prompt: NotRequired[str | None]
    """The text that they came from, if there is one: it is shown in the output."""
    prompt_token_ids: NotRequired[list[int] | None]
    """With prompt_is_token_ids: as many ids as there are rows, for prompts of which only a part is given as embeddings."""
    prompt_is_token_ids: NotRequired[list[bool] | None]
    """Where the id counts (True), and where the row of prompt_embeds does."""
    cache_salt: NotRequired[str | None]
    """Requests share cached blocks only with those of the same salt."""


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
"""One prompt, in any of the forms that programs for vLLM annotate with this name."""
