"""What clients may send, as pydantic models: OpenAI's fields, vLLM's sampling fields, and the latency fields of actorllm.

Types only, and the OpenAPI document that comes of them. What the values may be is checked where they are used:
`SamplingParams`, `Conversation` and the engine have the messages that say what to do. A field that is null counts as not
given. Fields that are not known here are kept in `model_extra`, so that `sampling` can refuse or name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from actorllm.server.bodies.limits import MAX_MESSAGES
from actorllm.server.envelope import NOTHING_RENAMED, ApiError, error_of_validation

Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ],
            "description": "Text, token ids, or a list of either.",
        }
    ),
]
"""Checked by hand: pydantic would try four types on every one of a hundred thousand ids. Long lists of ids are arrays."""

Objective = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "description": "Seconds per output token."},
                {
                    "type": "object",
                    "properties": {
                        name: {"type": "number"} for name in ("ttft", "tpot", "e2e", "ttft_per_prompt_token")
                    },
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]


T = TypeVar("T")
B = TypeVar("B", bound="Body")

Many = Annotated[list[T], Field(fail_fast=True)]
"""The first wrong item is enough: else pydantic makes an error of each, and a body has room for millions."""


def _ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else check(value)


TokenIds = Annotated[Many[int], WrapValidator(_ids)]
"""Where they are many they come as an array (`Body.TOKEN_FIELDS`), of which there is nothing left to be checked."""

Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]

MAX_FEW = 100


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_FEW:
        raise ValueError(f"{len(value)} fields are more than there can be")
    return value


def _numbers(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    numbers = {}
    for name, given in value.items():
        try:
            numbers[name] = float(given)
        except (TypeError, ValueError):
            raise ValueError(f"the value of {name!r:.40} must be a number") from None
    return numbers


Few = BeforeValidator(_few)
"""On a mapping whose values are checked: as `Many`, which acts on lists."""
Numbers = Annotated[dict[str, float], BeforeValidator(_numbers)]
"""The same for a mapping that may be long."""


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    TOKEN_FIELDS: ClassVar[tuple[str, ...]] = ()
    """Fields that may be long lists of token ids, or lists of such lists: these come as arrays."""

    def given(self) -> dict[str, Any]:
        """The declared fields that were sent and are not null."""
        values = self.__dict__
        return {name: values[name] for name in self.model_fields_set if name in values and values[name] is not None}

    def renamed(self) -> dict[str, str]:
        """Parameters that this body gives by names of its API, for errors: that name by the parameter's own."""
        return {}


def checked(model: type[B], tree: Any, renamed: Mapping[str, str] = NOTHING_RENAMED) -> B:
    """A body, checked against the types of its fields. renamed: what the client calls them. Raises ApiError."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        told = error_of_validation(error)
        name = renamed.get(told.param or "")
        if name is not None:
            told = ApiError(told.status, told.message.replace(told.param or "", name, 1), name)
        raise told from error


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI's: events padded to one length. There is no padding here, and a request that asks for it is told so."""


class EngineRequest(Body):
    """What requests for text and for vectors share: how the engine reads and schedules them."""

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    slo: Objective = None
    is_latency_sensitive: bool | None = None
    type_info: str | None = None
    tenant: str | None = None
    return_metrics: bool | None = None
    """Say how long this request waited and took, in `metrics` of the answer or of its last event."""


class Generation(EngineRequest):
    """What all requests for text share."""

    TOKEN_FIELDS: ClassVar[tuple[str, ...]] = ("allowed_token_ids",)

    model: str | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions, Few] | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: Numbers | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Many[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Many[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    repetition_detection: Annotated[dict[str, int], Few] | None = None
    thinking_token_budget: int | None = None
    stream_interval: int | None = None
    vllm_xargs: Annotated[dict[str, Any], Few] | None = None
    kv_transfer_params: Annotated[dict[str, Any], Few] | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None


class ResumableBody(Generation):
    """What requests share whose streams may outlive their readers."""

    resume_for: float | None = None
    """Seconds without a reader until the request is aborted, and from its end until its events are forgotten."""


class CompletionRequest(ResumableBody):
    """`POST /v1/completions`."""

    TOKEN_FIELDS = ("prompt", "allowed_token_ids")

    prompt: Prompts
    best_of: int | None = None
    logprobs: int | None = None

    def renamed(self) -> dict[str, str]:
        return {"prompt_logprobs": "logprobs"} if self.prompt_logprobs is None else {}


class ChatCompletionRequest(ResumableBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Messages | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    documents: Messages | None = None

    def renamed(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"max_tokens": limit, "logprobs": "top_logprobs"}


class TokenizeRequest(Body):
    """`POST /tokenize`: of a prompt, or of messages through the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    TOKEN_FIELDS = ("tokens",)

    model: str | None = None
    tokens: TokenIds


class AbortRequest(Body):
    """`POST /abort_requests`: by the ids that the answers have."""

    request_ids: Many[str] | None = None
    abort_all: bool | None = None
