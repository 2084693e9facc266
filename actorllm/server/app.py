"""`create_app`: the ASGI application, to be served by `actorllm serve` or mounted into another one.

It needs no lifespan, owns no engine and knows no event loop. The application that mounts it starts and ends the engine, or lets
the first request start it. One `ServerState` is shared by all endpoints (`app.state.server`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from actorllm import __version__
from actorllm.api.async_llm import AsyncLLM
from actorllm.errors import ActorLLMError, ConfigError
from actorllm.server import adapter_routes, demo, developer_routes, invocations, live, profile_routes
from actorllm.server.answer_options import AnswerOptions
from actorllm.server.anthropic.blocks import CountTokensRequest, MessagesRequest
from actorllm.server.anthropic.endpoints import router as anthropic_router
from actorllm.server.audio.speech_routes import router as audio_router
from actorllm.server.envelope import KINDS, ApiError, error_of
from actorllm.server.guards import DEFAULT_BODY_TIMEOUT_S, DEFAULT_MAX_BODY_BYTES, Guards, route_path
from actorllm.server.middleware import middleware_named
from actorllm.server.ollama.bodies import ChatBody, EmbedBody, GenerateBody
from actorllm.server.ollama.routes import router as ollama_router
from actorllm.server.operations import JSONResponse, router, state_of, takes
from actorllm.server.outliving.paths import router as outliving_router
from actorllm.server.protocol import (
    AbortRequest,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from actorllm.server.responses.endpoints import router as responses_router
from actorllm.server.responses.request import ResponsesRequest
from actorllm.server.sampling import Defaults
from actorllm.server.served_models import LoRAModule, ServedModels
from actorllm.server.state import ServerState
from actorllm.server.text_endpoints import complete, converse, generate
from actorllm.server.tokens import inference, refused, render, several
from actorllm.server.tool_parsers import parser_named
from actorllm.server.vectors.bodies import BODIES as POOLED_BODIES
from actorllm.server.vectors.routes import router as vectors_router
from actorllm.types.vllm_variables import is_on

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

BODIES: tuple[type[Body], ...] = (
    *(CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest, AbortRequest),
    demo.GenerateRequest,
    *POOLED_BODIES,
    *(ResponsesRequest, MessagesRequest, CountTokensRequest, ChatBody, GenerateBody, EmbedBody),
    *(inference.InferenceRequest, several.BatchChatRequest),
    *(adapter_routes.LoadAdapterRequest, adapter_routes.UnloadAdapterRequest),
    *(developer_routes.CollectiveRpcRequest, developer_routes.FolderUpdateRequest, developer_routes.VersionRequest),
    *(developer_routes.TransferInitRequest, developer_routes.TransferPartRequest, developer_routes.TransferEndRequest),
)

ROUTERS = (
    *(responses_router, outliving_router, anthropic_router, ollama_router),
    *(inference.router, render.router, several.router, invocations.router, audio_router, refused.router),
)


def add_routes(app: FastAPI, *, adapters: bool, develops: bool, profiles: bool) -> None:
    """All endpoints. adapters, develops, profiles: also those that load adapters, those for development, and those of profiles."""
    # First what is asked for most: a request is held against one route after the other.
    app.add_api_route("/v1/completions", complete, methods=["POST"], openapi_extra=takes(CompletionRequest))
    app.add_api_route("/v1/chat/completions", converse, methods=["POST"], openapi_extra=takes(ChatCompletionRequest))
    for one in ROUTERS:
        app.include_router(one)
    app.add_api_route("/generate", generate, methods=["POST"], openapi_extra=takes(demo.GenerateRequest))
    for one in (router, live.router, vectors_router):
        app.include_router(one)
    if adapters:
        app.include_router(adapter_routes.router)
    if develops:
        app.include_router(developer_routes.router)
    if profiles:
        app.include_router(profile_routes.router)


def create_app(
    llm: AsyncLLM,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_key: str | Sequence[str] | None = None,
    allowed_origins: Sequence[str] = (),
    allowed_methods: Sequence[str] = ("*",),
    allowed_headers: Sequence[str] = ("*",),
    allow_credentials: bool = False,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S,
    max_concurrent_requests: int | None = None,
    trust_request_chat_template: bool = False,
    enable_log_requests: bool = False,
    tracer_provider: TracerProvider | None = None,
    tool_call_parser: str | None = None,
    vllm_metrics: bool = True,
    root_path: str = "",
    middleware: Sequence[str] = (),
    disable_fastapi_docs: bool = False,
    lora_modules: Sequence[LoRAModule] | None = None,
    enable_dev_endpoints: bool = False,
    **answers: Any,
) -> FastAPI:
    """An application that serves this engine over OpenAI's API.

    served_model_name: what requests call the model; the first of several is in answers to those that call it nothing.
    api_key: one of these is asked for as a bearer token, except for health and metrics. allowed_origins: of browsers
    (CORS); none: no headers for them. body_timeout_s: how long the body of a request may take to arrive.
    max_concurrent_requests: more are answered with 429. trust_request_chat_template: requests may bring their own.
    enable_log_requests: a line in the log about each of them when it has ended. tracer_provider: of OpenTelemetry; a span for
    each (needs actorllm[otel]).
    tool_call_parser: how the model writes tool calls (`tool_parsers.PARSERS`, `tool_formats.FORMATS`, or a class as
    'module:Class'); None: as its chat template shows them. Its thoughts are read by the engine's `reasoning_parser`.
    vllm_metrics: /metrics also has what vLLM counts, under its names. root_path: under which a proxy serves all of this.
    middleware: classes of ASGI or asynchronous functions of request and next, as 'module.name'; the last one sees a request first.
    disable_fastapi_docs: without /docs and /openapi.json. lora_modules: adapters that requests may name, each as 'name=path' or an
    object with name, path and base_model_name. enable_dev_endpoints: as in `serve`.
    answers: the fields of `AnswerOptions`.
    Raises ConfigError, and TypeError for an argument that does not exist.
    """
    names = _strings("served_model_name", served_model_name) or [llm.config.model.name]
    keys = _strings("api_key", api_key)
    for name, value in (("max_body_bytes", max_body_bytes), ("body_timeout_s", body_timeout_s)):
        if not value > 0:
            raise ConfigError(f"{name}={value!r} must be above 0")
    if max_concurrent_requests is not None and max_concurrent_requests < 1:
        raise ConfigError(f"max_concurrent_requests={max_concurrent_requests!r} must be at least 1")
    model = llm.config.model
    models = ServedModels(names, lora_modules, adapts=llm.config.lora is not None)
    layers = [middleware_named(path) for path in middleware]
    parser_named(tool_call_parser, [])  # says what is wrong with it before anything is started
    defaults = Defaults.of(model, AnswerOptions.of(**answers), trusts_chat_templates=trust_request_chat_template)
    hidden: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None} if disable_fastapi_docs else {}
    app = FastAPI(
        title="actorllm",
        version=__version__,
        default_response_class=JSONResponse,
        responses=_ERRORS,
        **hidden,
    )
    app.root_path = root_path
    created = int(time.time())
    app.state.server = ServerState(llm, models, defaults, max_concurrent_requests, created, tool_call_parser)
    app.state.server.logs_requests = enable_log_requests
    app.state.server.has_vllm_metrics = vllm_metrics
    if tracer_provider is not None:
        from actorllm.server.tracing import Tracing

        app.state.server.tracing = Tracing(tracer_provider)
    develops = enable_dev_endpoints or is_on(developer_routes.VARIABLE)
    profiles = llm.config.profile_folder is not None
    add_routes(app, adapters=is_on(adapter_routes.VARIABLE), develops=develops, profiles=profiles)
    app.add_exception_handler(HTTPException, _tell_of_routing)
    app.add_exception_handler(ApiError, _tell)
    app.add_exception_handler(ActorLLMError, _tell)
    app.add_middleware(Guards, api_keys=keys, max_body_bytes=max_body_bytes, body_timeout_s=body_timeout_s)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=list(allowed_methods),
            allow_headers=list(allowed_headers),
            allow_credentials=allow_credentials,
        )
    for layer in layers:
        app.add_middleware(layer)
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign,assignment]
    return app


# What goes wrong outside of an Answer


async def _tell(request: Request, error: Exception) -> Response:
    told = error_of(error)
    state = state_of(request)
    if state.tracing is not None:
        state.tracing.record_refusal(request.scope, state.model_names[0], told, error)
    return _error_response(request, told, told.headers())


async def _tell_of_routing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = ApiError(error.status_code, f"{request.method} {request.url.path:.200}: {error.detail}")
    return _error_response(request, told, {**(error.headers or {}), **told.headers()})


def _error_response(request: Request, told: ApiError, headers: dict[str, str]) -> Response:
    error_format = state_of(request).defaults.answers.error_format
    return JSONResponse(told.body(route_path(request.scope), error_format), told.status, headers)


def _strings(name: str, value: str | Sequence[str] | None) -> list[str]:
    values = [] if value is None else [value] if isinstance(value, str) else list(value)
    if not all(isinstance(one, str) and one for one in values):
        raise ConfigError(f"{name} must be a string, or several, and none of them empty")
    return values


# The OpenAPI document

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": kind, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, kind in KINDS.items()
    if status != 403
}


def _openapi(app: FastAPI) -> Mapping[str, Any]:
    if app.openapi_schema is None:
        tree = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = tree.setdefault("components", {}).setdefault("schemas", {})
        for model in BODIES:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        app.openapi_schema = tree
    return app.openapi_schema
