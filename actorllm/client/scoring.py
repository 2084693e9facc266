"""How texts are scored against each other: what is asked of the engine for that, and what is made of its answers.

A model that embeds compares two vectors by their cosine, or the vectors of all tokens (late interaction). A cross-encoder
reads two texts as one prompt. Called by the front doors and by the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actorllm.errors import InvalidParameterError
from actorllm.intake.tokenization import Prompt, TextPair
from actorllm.text.chat_template import Conversation
from actorllm.types.params import PoolingParams
from actorllm.types.pooling_outputs import (
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    cosine,
    max_similarity,
    paired,
    scored,
)
from actorllm.types.pooling_params import Pooler


@dataclass(frozen=True, slots=True)
class TextScoring:
    """One call's prompts, in the order in which their outputs are expected."""

    prompts: list[Prompt]
    params: PoolingParams
    num_first: int | None
    """So many are of the first side; None: every prompt is a pair."""

    @classmethod
    def of(
        cls,
        pooler: Pooler | None,
        first: Sequence[Prompt],
        second: Sequence[Prompt],
        params: PoolingParams | None,
        template: str | None = None,
    ) -> TextScoring:
        """pooler: of the engine; None: it generates text. template: a Jinja template that makes one prompt of two texts.

        Raises InvalidParameterError.
        """
        pairs = paired(len(first), len(second))
        params = PoolingParams() if params is None else params
        task = None if params.task == "score" else params.task
        if pooler is None or pooler.head is None:
            if template is not None:
                raise InvalidParameterError(
                    "chat_template: only a cross-encoder reads two texts as one prompt, and this model is none; leave it out"
                )
            task = task or (pooler.task if pooler is not None else None) or "embed"
            return cls([*first, *second], replace(params, task=task), len(first))
        if not pooler.is_cross_encoder:
            raise InvalidParameterError(
                f"score compares texts by embeddings, or by a model with one label; this one has {pooler.head.size}"
                f"{' for every token' if pooler.head.is_of_tokens else ''}: use classify() or encode()"
            )
        return cls(
            [_pair(pooler, first[i], second[j], template) for i, j in pairs],
            replace(params, task=task or "classify"),
            None,
        )

    def outputs(
        self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], separator: int | None
    ) -> list[ScoringRequestOutput]:
        """separator: the padding token, which stands between the ids of two texts as in vLLM."""
        if self.num_first is None:
            return [ScoringRequestOutput.from_base(output) for output in outputs]
        compare = max_similarity if self.params.task == "token_embed" else cosine
        return scored(outputs[: self.num_first], outputs[self.num_first :], separator, compare)


def reads_pairs(pooler: Pooler | None) -> bool:
    """Two texts are one prompt, so that a text which is compared with several is read with each. pooler: of the engine."""
    return pooler is not None and pooler.is_cross_encoder


def tokenization_of(template: str | None, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Tokenization arguments: a prompt that a template has made of two texts gets special tokens as any text, as in vLLM."""
    return given if template is None else {"add_special_tokens": True, **(given or {})}


def _pair(pooler: Pooler, first: Prompt, second: Prompt, template: str | None) -> Prompt:
    if not isinstance(first, str) or not isinstance(second, str):
        raise InvalidParameterError("a cross-encoder compares texts; other kinds of prompts are not supported")
    if template is not None:
        messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
        return Conversation.of(messages, is_own=True, chat_template=template, add_generation_prompt=False)
    # A head that is made of a head for text belongs to a model that was trained on one text, as vLLM has it.
    return first + second if pooler.head is not None and pooler.head.tokens else TextPair(first, second)
