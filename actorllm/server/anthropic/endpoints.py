"""The paths of Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from actorllm.actors.engine_thread import HostLoop
from actorllm.errors import ActorLLMError
from actorllm.server import chat
from actorllm.server.anthropic.blocks import CountTokensRequest, MessagesRequest, ask, chat_body
from actorllm.server.asking import answer_of
from actorllm.server.envelope import error_of
from actorllm.server.operations import JSONResponse, read_body, state_of, takes
from actorllm.server.sampling import extras_of

router = APIRouter()


@router.post("/v1/messages", openapi_extra=takes(MessagesRequest))
async def messages(request: Request) -> Response:
    """Answer a conversation, as Anthropic's API has it."""
    answer, _ = await answer_of(request, MessagesRequest, ask, "messages")
    return answer


@router.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has as the model would see it."""
    state = state_of(request)
    body = await read_body(request, CountTokensRequest)
    named = state.models.arguments_of(state.check_model(body.model))
    try:
        as_chat = chat_body(body)
        extras = extras_of(as_chat, request.headers)
        conversation = chat.conversation_of(as_chat, state.defaults)
        ids = await HostLoop.current().result_of(state.engine.token_ids_of(conversation, False, **named))
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, CountTokensRequest.model_fields, "messages") from error
    return JSONResponse({"input_tokens": len(ids)}, headers=extras.headers())
