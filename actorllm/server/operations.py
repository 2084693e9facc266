"""Every endpoint that generates nothing: models, health, tokenizing, and what an operator asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from anyio import to_thread
from fastapi import APIRouter, Request, Response

from actorllm import __version__
from actorllm.actors.engine_thread import HostLoop
from actorllm.errors import ActorLLMError, EngineDrainingError, InvalidParameterError
from actorllm.server import chat, metrics
from actorllm.server.batch import json_of
from actorllm.server.envelope import ApiError, error_of
from actorllm.server.protocol import AbortRequest, Body, DetokenizeRequest, TokenizeRequest, checked
from actorllm.server.sampling import extras_of
from actorllm.server.state import ServerState
from actorllm.text.chat_template import Conversation
from actorllm.text.tokenizer import Tokenizer

router = APIRouter()

B = TypeVar("B", bound=Body)

BODY = "actorllm.body"
"""Where in the scope the body is, as a tree, if it has been read before its endpoint was known."""


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else orjson.dumps(content)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def read_body(request: Request, model: type[B]) -> B:
    """The body, checked against the types of its fields. Raises ApiError."""
    tree = request.scope.pop(BODY, None)
    if tree is None:
        tree = await state_of(request).bodies.read(request, model.TOKEN_FIELDS)
    return checked(model, tree)


async def read_admitted(request: Request, model: type[B]) -> B:
    """As `read_body`, of a request to the engine, of which there may be too many."""
    with state_of(request).admitted():
        return await read_body(request, model)


def takes(model: type[Body]) -> dict[str, Any]:
    """What the OpenAPI document says of an endpoint that calls `read_body`."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


# Models


def _card(state: ServerState, name: str) -> dict[str, Any]:
    model, adapter = state.engine.config.model, state.models.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "actorllm",
        "root": model.name if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else adapter.base_model_name or state.model_names[0],
        "max_model_len": model.told_model_len,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model, by every name it is served under, and its adapters."""
    state = state_of(request)
    names = [*state.models.names, *state.models.adapters]
    return JSONResponse({"object": "list", "data": [_card(state, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """One of them."""
    state = state_of(request)
    return JSONResponse(_card(state, state.check_model(name)))


# Health


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are taken; 503 when the engine has ended, or is about to."""
    state = state_of(request)
    if state.is_draining:
        raise EngineDrainingError("the server is about to end")
    await state.llm.check_health()
    return Response()


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """As /health."""
    return await health(request)


@router.get("/version")
async def version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """How many requests for text are under way, in all API processes of this server."""
    return JSONResponse({"server_load": state_of(request).num_in_flight})


# Tokens


OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")
"""Fields of `/tokenize` that say how messages become a prompt."""


async def _tokenizer(state: ServerState, named: Mapping[str, Any]) -> Tokenizer:
    """named: what `ServedModels.arguments_of` says of the model of a request."""
    return await HostLoop.current().result_of(state.engine.tokenizer_of(named.get("lora_request")))


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The ids of a prompt, or of a conversation as the model would see it."""
    state = state_of(request)
    body = await read_body(request, TokenizeRequest)
    named = state.models.arguments_of(state.check_model(body.model))
    extras = extras_of(body, request.headers)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "one of prompt and messages is needed, and not both", "prompt")
    if body.messages is None:
        given = body.given()
        extras.warnings += [f"{name} has no effect on a prompt" for name in OF_MESSAGES if name in given]

    try:
        prompt: str | Conversation = body.prompt or ""
        adds = body.add_special_tokens is not False
        if body.messages is not None:
            prompt, adds = chat.conversation_of(body, state.defaults), bool(body.add_special_tokens)
        ids = await HostLoop.current().result_of(state.engine.token_ids_of(prompt, adds, **named))
        strings = None
        if body.return_token_strs:
            tokenizer = await _tokenizer(state, named)
            strings = await to_thread.run_sync(tokenizer.tokens_of, ids)
    except (ActorLLMError, ApiError, RecursionError) as error:  # any other is unforeseen, and logged as such
        prompt_field = "prompt" if body.messages is None else "messages"
        raise error_of(error, TokenizeRequest.model_fields, prompt_field) from error
    tree: dict[str, Any] = {"count": len(ids), "max_model_len": state.engine.config.model.told_model_len}
    tree["tokens"] = orjson.Fragment(await json_of(ids))
    tree["token_strs"] = None if strings is None else orjson.Fragment(await json_of(strings))
    return JSONResponse(tree, headers=extras.headers())


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body = await read_body(request, DetokenizeRequest)
    named = state.models.arguments_of(state.check_model(body.model))
    extras = extras_of(body, request.headers)
    vocab_size = state.engine.config.model.vocab_size

    def decoded(tokenizer: Tokenizer) -> str:
        for i in (min(body.tokens, default=0), max(body.tokens, default=0)):
            if not 0 <= i < vocab_size:
                raise ApiError(400, f"tokens: {i!r:.40} is outside the vocabulary of {vocab_size} tokens", "tokens")
        return tokenizer.decode(body.tokens)

    try:
        tokenizer = await _tokenizer(state, named)
    except ActorLLMError as error:  # of the files of an adapter
        raise error_of(error, DetokenizeRequest.model_fields, "model") from error
    text = await to_thread.run_sync(decoded, tokenizer)
    return JSONResponse({"prompt": text}, headers=extras.headers())


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """tokenizer_config.json, which has the chat template too. Query: model=NAME is an adapter that may bring its own."""
    state = state_of(request)
    name = state.check_model(request.query_params.get("model"))
    tokenizer = await _tokenizer(state, state.models.arguments_of(name))
    return JSONResponse({"tokenizer_class": None, **tokenizer.config})


# Operators


@router.post("/abort_requests", openapi_extra=takes(AbortRequest))
async def abort_requests(request: Request) -> Response:
    """End requests by the ids in their answers, or all of this server; each is answered with what there is."""
    state = state_of(request)
    body = await read_body(request, AbortRequest)
    extras = extras_of(body, request.headers)
    if not body.abort_all and body.request_ids is None:
        raise ApiError(400, "request_ids, or abort_all=true, is needed", "request_ids")
    names = None if body.abort_all else body.request_ids
    tree = {"num_aborted": state.abort(names) + await state.peers.abort(names)}
    return JSONResponse(tree, headers=extras.headers())


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached KV. Query: reset_running_requests=true computes that of running requests again, too."""
    text = request.query_params.get("reset_running_requests", "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidParameterError(f"reset_running_requests={text!r:.40} must be true or false")
    done = await state_of(request).llm.reset_prefix_cache(text in ("true", "1"))
    return JSONResponse({"reset": done})


@router.post("/reset_mm_cache")
async def reset_mm_cache(request: Request) -> Response:
    """Keep no images or recordings by their uuids. Of several API processes the one that answers forgets its own."""
    await state_of(request).llm.reset_mm_cache()
    return Response()


@router.post("/reset_encoder_cache")
async def reset_encoder_cache(request: Request) -> Response:
    """Keep no rows of images or recordings that were encoded. Of several API processes the one that answers forgets its own."""
    await state_of(request).llm.reset_encoder_cache()
    return Response()


@router.get("/metrics")
async def get_metrics(request: Request) -> Response:
    """Counters, gauges and histograms over all programs that use the engine: Prometheus' text format, or OpenMetrics on Accept."""
    state = state_of(request)
    stats = await state.llm.stats()
    supervisor = await state.peers.supervisor()
    if supervisor is not None:
        stats["supervisor"] = supervisor
    model = state.engine.config.model
    is_open = metrics.OPEN_METRICS in request.headers.get("accept", "")
    name, has_vllm_names = state.model_names[0], state.has_vllm_metrics
    text = metrics.render(
        stats, name, model.max_model_len, state.board.lag(), is_open=is_open, has_vllm_names=has_vllm_names
    )
    return Response(text, media_type=metrics.OPEN_METRICS_TYPE if is_open else metrics.CONTENT_TYPE)
