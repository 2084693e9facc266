"""`POST /invocations`: the one path by which Amazon SageMaker calls a model. What is in the body says which endpoint answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from actorllm.server.envelope import ApiError
from actorllm.server.operations import BODY, state_of
from actorllm.server.text_endpoints import complete, converse
from actorllm.server.vectors import routes

router = APIRouter()

TOKEN_FIELDS = ("prompt", "input", "allowed_token_ids")
"""Of the bodies of all these endpoints."""
PAIRS = ("queries", "text_1", "data_1")
"""One of these is in a body that asks for scores."""


@router.post("/invocations")
async def invoke(request: Request) -> Response:
    """Answered as at the endpoint that takes such a body: a conversation, a prompt, or what is to be pooled."""
    state = state_of(request)
    with state.admitted():
        body = await state.bodies.read(request, TOKEN_FIELDS)
    endpoint = endpoint_of(body, state.engine.config.model.supported_tasks)
    request.scope[BODY] = body
    return await endpoint(request)


def endpoint_of(body: Mapping[str, Any], tasks: tuple[str, ...]) -> Callable[[Request], Awaitable[Response]]:
    """tasks: of the model, since a classifier and an encoder are asked alike. Raises ApiError where no endpoint takes the body."""
    if "generate" in tasks:
        if "messages" in body:
            return converse
        if "prompt" in body:
            return complete
        raise ApiError(400, "one of messages and prompt is needed: the model generates", "messages")
    if "query" in body and "documents" in body:
        return routes.rerank
    if any(name in body for name in PAIRS):
        return routes.score
    if "input" in body or "messages" in body:
        return routes.classify if "classify" in tasks else routes.embeddings if "embed" in tasks else routes.pool
    if "data" in body:
        return routes.pool
    told = "one of input, messages, query with documents, and queries with documents is needed"
    raise ApiError(400, told, "input")
