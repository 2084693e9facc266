"""`/v1/completions/render`, `/v1/chat/completions/render`: what the engine would be asked, as `/inference/v1/generate` takes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from actorllm.actors.engine_thread import HostLoop
from actorllm.errors import ActorLLMError
from actorllm.messages.logit_rules import check_ids
from actorllm.server import chat, completions
from actorllm.server.asking import read_named
from actorllm.server.batch import Portions, json_of
from actorllm.server.completions import Asked
from actorllm.server.copies import check_size
from actorllm.server.envelope import ApiError, error_of
from actorllm.server.operations import JSONResponse, state_of, takes
from actorllm.server.protocol import ChatCompletionRequest, CompletionRequest, Generation
from actorllm.server.random_names import random_name
from actorllm.server.state import ServerState
from actorllm.text.chat_template import Conversation
from actorllm.types.params import SamplingParams

router = APIRouter()

NOT_SENT = ("output_kind",)


@router.post("/v1/completions/render", openapi_extra=takes(CompletionRequest))
async def render_completion(request: Request) -> Response:
    """A list, with one body for each prompt."""
    return JSONResponse(b"[%b]" % b",".join(await _rendered(request, CompletionRequest, completions.ask, "prompt")))


@router.post("/v1/chat/completions/render", openapi_extra=takes(ChatCompletionRequest))
async def render_chat(request: Request) -> Response:
    """One body."""
    (body,) = await _rendered(request, ChatCompletionRequest, chat.ask, "messages")
    return JSONResponse(body)


async def _rendered(request: Request, model: type[Generation], ask: Any, prompt_field: str) -> list[bytes]:
    state = state_of(request)
    body, name = await read_named(request, model)
    if body.truncate_prompt_tokens is not None:
        told = "truncate_prompt_tokens is not supported here; cut the token ids that come back"
        raise ApiError(400, told, "truncate_prompt_tokens")
    try:
        asked: Asked = ask(body, request.headers, state.defaults, name, state.decode)
        check_ids(asked.params, state.engine.config.model.vocab_size)
        head = {"model": name, "stream": bool(body.stream), "cache_salt": body.cache_salt}
        head |= {"priority": body.priority or 0, "features": None, "sampling_params": _sent(asked.params)}
        if body.stream_options is not None:
            head["stream_options"] = body.stream_options.model_dump(exclude_none=True)
        shared = orjson.dumps(head)[1:]
        check_size(len(asked.prompts), len(shared), prompt_field)
        adds, portions, bodies = body.add_special_tokens, Portions(), []
        first = body.request_id or random_name()
        for number, prompt in enumerate(asked.prompts):
            called = first if len(asked.prompts) == 1 else f"{first}-{number}"
            ids = await json_of(await _ids_of(state, name, prompt, adds))
            bodies.append(b'{"request_id":%b,"token_ids":%b,%b' % (orjson.dumps(called), ids, shared))
            await portions.count()
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, model.model_fields, prompt_field, body.renamed()) from error
    return bodies


async def _ids_of(state: ServerState, name: str, prompt: Any, adds: bool | None) -> list[int]:
    if isinstance(prompt, dict):  # with a salt
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if isinstance(prompt, np.ndarray):
        ids: list[int] = prompt.tolist()
        return ids
    if isinstance(prompt, list):
        return prompt
    adds = bool(adds) if isinstance(prompt, Conversation) else adds is not False
    return await HostLoop.current().result_of(
        state.engine.token_ids_of(prompt, adds, **state.models.arguments_of(name))
    )


def _sent(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not as they are by default."""
    sent = {}
    for field in dataclasses.fields(params):
        value, by_default = getattr(params, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            by_default = field.default_factory()
        if field.name.startswith("_") or field.name in NOT_SENT or (value == by_default and field.name != "max_tokens"):
            continue
        sent[field.name] = _plain(value)
    return sent


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        return {name: _plain(one) for name in fields if (one := getattr(value, name)) not in (None, False)}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return sorted(value) if isinstance(value, set | frozenset) else value
