"""`POST /inference/v1/generate`: token ids in, token ids out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request, Response

from actorllm.errors import InvalidParameterError
from actorllm.intake.tokenization import Prompt
from actorllm.server.asking import answer_of
from actorllm.server.completions import Asked
from actorllm.server.copies import check_copies
from actorllm.server.envelope import ApiError, shown
from actorllm.server.logprob_format import LogprobsView, finite, of_prompt
from actorllm.server.operations import takes
from actorllm.server.protocol import Body, Few, Objective, StreamOptions, TokenIds
from actorllm.server.random_names import random_name
from actorllm.server.sampling import SAMPLING_FIELDS, Defaults, extras_of
from actorllm.server.shape import DONE, PromptState, Shape, usage, versions_of
from actorllm.types.kv_transfer import NAME as KV_TRANSFER
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import RequestOutputKind, SamplingParams

router = APIRouter()

MODES = ("tokens", "text")
NOT_HERE = ("features", "content_parts", "ec_transfer_params", "reasoning_parser_kwargs")
"""Fields that would have to be honoured, and are not; null asks for nothing."""


class InferenceRequest(Body):
    """`POST /inference/v1/generate`."""

    TOKEN_FIELDS = ("token_ids",)

    token_ids: TokenIds
    sampling_params: dict[str, Any]
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions, Few] | None = None
    return_token_ids: bool | None = None
    output_mode: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    slo: Objective = None
    is_latency_sensitive: bool | None = None
    type_info: str | None = None
    tenant: str | None = None
    kv_transfer_params: Annotated[dict[str, Any], Few] | None = None

    def renamed(self) -> dict[str, str]:
        return {name: f"sampling_params.{name}" for name in SAMPLING_FIELDS}


@router.post("/inference/v1/generate", openapi_extra=takes(InferenceRequest))
async def generate(request: Request) -> Response:
    """Go on from token ids."""
    answer, _ = await answer_of(request, InferenceRequest, ask, "token_ids")
    return answer


def ask(
    body: InferenceRequest,
    headers: Mapping[str, str],
    defaults: Defaults,
    model: str,
    decode: Callable[[list[int]], str],
) -> Asked:
    """Raises ApiError, InvalidParameterError and InvalidPromptError."""
    extras = extras_of(body, headers)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    for name in NOT_HERE:
        if (body.model_extra or {}).get(name) is not None:
            raise ApiError(400, f"{name} is not supported by this server; leave it out", name)
    mode = body.output_mode or "tokens"
    if mode not in MODES:
        raise ApiError(400, f"output_mode={shown(mode)} must be one of {', '.join(MODES)}", "output_mode")
    given = {"max_tokens": None, **body.sampling_params}  # None: as many as there is room for
    given["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    extra = given.get("extra_args")
    if body.kv_transfer_params is not None and isinstance(extra, Mapping | None):
        given["extra_args"] = {**(extra or {}), KV_TRANSFER: body.kv_transfer_params}
    try:
        params = SamplingParams(**given)
    except TypeError as error:  # a name that is none of its arguments
        raise InvalidParameterError(f"sampling_params: {str(error).rpartition(') ')[2]:.200}") from error
    if body.stream and params.prompt_logprobs is not None:
        raise ApiError(400, "sampling_params: prompt_logprobs are not available in a stream", "sampling_params")
    if body.return_token_ids and body.stream:
        check_copies([body.token_ids], params.n, "return_token_ids")
    prompt: Prompt = body.token_ids
    if body.cache_salt is not None:
        prompt = {"prompt_token_ids": body.token_ids, "cache_salt": body.cache_salt}
    shape = TokensShape(body, params, model)
    return Asked([prompt], params, extras, shape, bool(body.stream))


class TokensShape(Shape):
    CONTENT_TYPE = b"text/event-stream; charset=utf-8"
    is_plain = False

    def __init__(self, body: InferenceRequest, params: SamplingParams, model: str) -> None:
        self.id = body.request_id or random_name()
        self._model = model
        self._created = int(time.time())
        self._has_text = body.output_mode == "text"
        self._has_prompt = bool(body.return_token_ids)
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._num_logprobs = params.logprobs
        self._state = PromptState([])

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        self._state.take(output)
        tree = {
            "request_id": self.id,
            "model": self._model,
            "created": self._created,
            "output_mode": "text" if self._has_text else "tokens",
            "choices": [self._choice(one) for one in output.outputs],
            "usage": self._usage(),
            "prompt_logprobs": None if output.prompt_logprobs is None else of_prompt(output),
            "prompt_token_ids": output.prompt_token_ids if self._has_prompt else None,
            "kv_transfer_params": output.kv_transfer_params,
        }
        return orjson.dumps(tree)

    def events(self, number: int, output: RequestOutput) -> bytes:
        self._state.take(output)
        choices = [self._choice(one) for one in output.outputs if one.token_ids or one.finish_reason is not None]
        if not choices:
            return b""
        tree: dict[str, Any] = {"request_id": self.id, "output_mode": "text" if self._has_text else "tokens"}
        tree["choices"] = choices
        if self._has_prompt and not self._state.has_begun:
            tree["prompt_token_ids"] = output.prompt_token_ids
        self._state.has_begun = True
        if output.kv_transfer_params is not None:  # with the end
            tree["kv_transfer_params"] = output.kv_transfer_params
        return b"data: %b\n\n" % orjson.dumps(tree)

    def close(self) -> bytes:
        if not self._has_usage:
            return DONE
        return b"data: %b\n\n" % orjson.dumps({"request_id": self.id, "choices": [], "usage": self._usage()}) + DONE

    def failure(self, body: bytes) -> bytes:
        return b"data: %b\n\n" % body + DONE

    def _usage(self) -> dict[str, Any]:
        told = usage(len(self._state.ids), self._state.num_output)
        return {**told, "prompt_tokens_details": {"cached_tokens": self._state.num_cached}}

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        tree: dict[str, Any] = {"index": one.index, "token_ids": one.token_ids}
        tree |= {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason, "logprobs": None}
        if self._has_text:
            tree["text"] = one.text
        if self._num_logprobs is not None and one.logprobs is not None:
            positions = list(zip(one.token_ids, one.logprobs, strict=True))
            if self._has_text:
                tree["logprobs"] = LogprobsView(self._num_logprobs).of_message(positions)
            else:
                tree["logprobs"] = {"content": [_entry(token_id, entries) for token_id, entries in positions]}
        if one.finish_reason is not None:
            tree["weight_versions"] = versions_of(one)
        return tree


def _entry(token_id: int, entries: Any) -> dict[str, Any]:
    """A token with the likeliest beside it: by ids, since no text is asked for."""
    ranked = sorted(entries.items(), key=lambda item: (item[0] != token_id, item[1].rank))
    shown = [{"token_id": i, "logprob": finite(entry), "rank": entry.rank} for i, entry in ranked]
    return {**shown[0], "top_logprobs": shown}
