"""The endpoints that generate text: `/v1/completions`, `/v1/chat/completions` and vLLM's plain `/generate`."""

from __future__ import annotations

from fastapi import Request, Response

from actorllm.errors import ActorLLMError
from actorllm.server import chat, completions, demo
from actorllm.server.answer import StreamedAnswer, WholeAnswer
from actorllm.server.envelope import error_of
from actorllm.server.operations import read_admitted, state_of
from actorllm.server.outliving.streams import answered
from actorllm.server.protocol import ChatCompletionRequest, CompletionRequest


async def complete(request: Request) -> Response:
    """Go on from prompts."""
    return await answered(request, CompletionRequest, completions.ask, "prompt")


async def converse(request: Request) -> Response:
    """Answer a conversation."""
    return await answered(request, ChatCompletionRequest, chat.ask, "messages")


async def generate(request: Request) -> Response:
    """vLLM's plain endpoint: a prompt and sampling parameters in, texts with the prompt out."""
    state = state_of(request)
    body = await read_admitted(request, demo.GenerateRequest)
    try:
        params, extras = demo.ask(body, request.headers, state.defaults)
        stream = state.llm.generate(body.prompt, params, **extras.arguments)
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, {*demo.GenerateRequest.model_fields, *(body.model_extra or {})}, "prompt") from error
    shape = demo.DemoShape(stream.request_id, body.prompt, params.n)
    answer = StreamedAnswer if body.stream else WholeAnswer
    told = {"x-request-id": shape.id, **extras.headers()}
    return answer(state, shape, [stream], demo.GenerateRequest.model_fields, "prompt", told)
