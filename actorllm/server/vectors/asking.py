"""From a checked body to what an engine that makes vectors is asked: prompts, how they are pooled, and the shape of the answer.

Called by the endpoints, and by `actorllm run-batch` for each of its lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actorllm.client.scoring import TextScoring, reads_pairs, tokenization_of
from actorllm.config import ModelConfig
from actorllm.errors import InvalidParameterError
from actorllm.intake.tokenization import Prompt
from actorllm.server.completions import check_length, prompts_of
from actorllm.server.copies import check_readings, check_vectors
from actorllm.server.envelope import ApiError, shown
from actorllm.server.sampling import Defaults, Extras, extras_of
from actorllm.server.vectors.bodies import (
    IDLE,
    OF_CONVERSATIONS,
    SIDES,
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TextsRequest,
)
from actorllm.server.vectors.vector_shapes import (
    ClassifyShape,
    EmbeddingShape,
    PooledShape,
    PoolingShape,
    RerankShape,
    ScoreShape,
)
from actorllm.text.chat_template import Conversation
from actorllm.types.params import MAX_N, PoolingParams
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput
from actorllm.types.pooling_params import Pooler


class AnswerShape(Protocol):
    """How the answer is made of the vectors."""

    @property
    def id(self) -> str: ...
    def body_of(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> bytes:
        """outputs: of each prompt, in their order. Raises ApiError."""


@dataclass(frozen=True, slots=True)
class PooledAsked:
    """What the engine is asked for one request."""

    prompts: list[Prompt]
    params: list[PoolingParams]
    """Of each prompt."""
    extras: Extras
    shape: AnswerShape


def ask(body: Pooled, headers: Mapping[str, str], defaults: Defaults, model: str, config: ModelConfig) -> PooledAsked:
    """model: its name in the answer. config: of the engine's model.

    Raises ApiError, InvalidParameterError and InvalidPromptError.
    """
    extras = pooled_extras(body, headers)
    asked = {name: getattr(body, name) for name in ("use_activation", "normalize", "pooling_type")}
    pooler = config.pooler
    shape: PooledShape
    if isinstance(body, TextsRequest):
        prompts = _prompts(body, defaults)
        params, shape = _of_texts(body, asked, pooler)
    else:
        params = PoolingParams(**asked)
        template = defaults.answers.chat_template if reads_pairs(pooler) else None
        scoring, documents = _scoring(body, params, pooler, defaults.max_prompt_characters, template)
        prompts, params = scoring.prompts, scoring.params
        if template is not None:
            given = extras.arguments.get("tokenization_kwargs")
            extras.arguments["tokenization_kwargs"] = tokenization_of(template, given)
        if isinstance(body, RerankRequest):
            shape = RerankShape(body, "rerank", scoring, documents)
        else:
            shape = ScoreShape(body, "score", scoring)
    field = prompt_field(body)
    if len(prompts) > MAX_N:
        raise InvalidParameterError(f"{field}: {len(prompts)} texts are more than {MAX_N}; send fewer at a time")
    if pooler is not None:
        kind = pooler.resolved(params.checked_copy(), config.name)
        if kind.is_of_tokens:
            check_vectors(prompts, kind.size, config.max_model_len, field)
    if body.cache_salt is not None:
        prompts = [salted(prompt, body.cache_salt) for prompt in prompts]
    shape.model, shape.slo = model, extras.slo
    return PooledAsked(prompts, [params] * len(prompts), extras, shape)


def prompt_field(body: Pooled) -> str:
    """The field of a body that has the prompts, for errors to name."""
    if getattr(body, "data", None) is not None:
        return "data"
    if isinstance(body, TextsRequest):
        return "input" if body.messages is None else "messages"
    return "documents" if isinstance(body, RerankRequest) else next(iter(_sides(body)), SIDES[0])[0]


def _prompts(body: TextsRequest, defaults: Defaults) -> list[Prompt]:
    if body.messages is None:
        if body.input is None:
            raise ApiError(400, "input: this field is required; a conversation goes into messages instead", "input")
        return prompts_of(body.input, defaults.max_prompt_characters, body.truncate_prompt_tokens)
    if body.input is not None:
        raise ApiError(400, "messages beside input: these are two ways to give a prompt; leave one out", "messages")
    conversation = defaults.conversation(
        body.messages,
        chat_template=body.chat_template,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return [conversation]


def _of_texts(body: TextsRequest, asked: dict[str, Any], pooler: Pooler | None) -> tuple[PoolingParams, PooledShape]:
    if isinstance(body, ClassifyRequest):
        labels = () if pooler is None or pooler.head is None else pooler.head.labels
        return PoolingParams(**asked, task="classify"), ClassifyShape(body, "classify", labels)
    assert isinstance(body, EmbeddingRequest | PoolingRequest)
    if body.encoding_format not in (None, "float", "base64"):
        raise ApiError(
            400, f"encoding_format={shown(body.encoding_format)} must be 'float' or 'base64'", "encoding_format"
        )
    if isinstance(body, EmbeddingRequest):
        return PoolingParams(**asked, dimensions=body.dimensions, task="embed"), EmbeddingShape(body, "embd")
    return PoolingParams(**asked, dimensions=body.dimensions, task=body.task), PoolingShape(body, "pool")


# Two sides


def _sides(body: Pooled) -> Sequence[tuple[str, str]]:
    return [names for names in SIDES if all(getattr(body, name, None) is not None for name in names)]


def _scoring(
    body: Pooled, params: PoolingParams, pooler: Pooler | None, max_characters: int, template: str | None
) -> tuple[TextScoring, list[str]]:
    """What is compared, and the texts of its second side."""
    if isinstance(body, RerankRequest):
        if body.top_n is not None and body.top_n < 0:
            raise ApiError(400, f"top_n={body.top_n} must be at least 0, which is all of them", "top_n")
        given = body.documents
        first = [body.query]
        second = [given] if isinstance(given, str) else [_text_of(document) for document in given]
        field = "query"
    else:
        assert isinstance(body, ScoreRequest)
        sides = _sides(body)
        if len(sides) != 1:
            told = "is needed" if not sides else "is needed, and there are more"
            raise ApiError(400, f"one of {', '.join(' and '.join(names) for names in SIDES)} {told}", SIDES[0][0])
        first, second = (_texts(getattr(body, name)) for name in sides[0])
        field = sides[0][0]
    # Before pairs are made: where texts are joined, each pair has a copy of the query.
    if reads_pairs(pooler) and len(first) == 1:
        check_readings(first[0], len(second), field)
    for text in [*first, *second] if body.truncate_prompt_tokens is None else ():
        check_length(text, max_characters)
    return TextScoring.of(pooler, first, second, params, template), second


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _text_of(document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise ApiError(
            400, "documents: an object needs a 'text'; documents of other kinds are not supported", "documents"
        )
    return text


# What all of them share


def pooled_extras(body: Pooled, headers: Mapping[str, str]) -> Extras:
    for name, accepted in IDLE.items():
        if getattr(body, name) not in accepted:
            idle = " or ".join(repr(value) for value in accepted if value is not None)
            instead = f"; leave it at {idle}" if idle else "; leave it out"
            raise ApiError(400, f"{name}={shown(getattr(body, name))} is not supported{instead}", name)
    for name in OF_CONVERSATIONS if getattr(body, "messages", None) is None else ():
        if getattr(body, name, None) not in (None, False, {}):
            raise ApiError(
                400, f"{name} is for a conversation: it needs messages, of /v1/embeddings, /classify or /pooling", name
            )
    extras = extras_of(body, headers)
    if body.truncation_side is not None:
        extras.arguments.setdefault("tokenization_kwargs", {})["truncation_side"] = body.truncation_side
    return extras


def salted(prompt: Prompt, salt: str) -> Prompt:
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": salt}
    return {"prompt" if isinstance(prompt, str | Conversation) else "prompt_token_ids": prompt, "cache_salt": salt}
