"""The paths of Ollama's API."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from actorllm import __version__
from actorllm.errors import ActorLLMError, InvalidParameterError
from actorllm.server.asking import answer_of
from actorllm.server.batch import submitted
from actorllm.server.completions import prompts_of
from actorllm.server.envelope import error_of
from actorllm.server.ollama.bodies import ChatBody, EmbedBody, GenerateBody, OllamaBody, ask_chat, ask_text
from actorllm.server.ollama.lines import timestamp
from actorllm.server.operations import JSONResponse, read_admitted, state_of, takes
from actorllm.server.sampling import extras_of, name_request
from actorllm.server.vectors.routes import PooledAnswer
from actorllm.server.vectors.vector_shapes import PooledShape
from actorllm.types.params import MAX_N, PoolingParams
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput

router = APIRouter()

TAG = ":latest"
"""What Ollama puts behind a name that has no tag."""


@router.post("/api/chat", openapi_extra=takes(ChatBody))
async def converse(request: Request) -> Response:
    """Answer a conversation, in lines of JSON unless stream is false."""
    body = await read_admitted(request, ChatBody)
    if not body.messages:
        return _loaded(request, body, {"message": {"role": "assistant", "content": ""}})
    answer, _ = await answer_of(request, ChatBody, ask_chat, "messages", TAG, body)
    return answer


@router.post("/api/generate", openapi_extra=takes(GenerateBody))
async def generate(request: Request) -> Response:
    """Answer a prompt through the chat template, or with raw=true go on from it."""
    body = await read_admitted(request, GenerateBody)
    if not body.prompt:
        return _loaded(request, body, {"response": ""})
    answer, _ = await answer_of(request, GenerateBody, ask_text, "prompt", TAG, body)
    return answer


def _loaded(request: Request, body: OllamaBody, empty: dict[str, Any]) -> Response:
    """To a request without a prompt, which asks for the model to be loaded: it is. empty: the answer, without text."""
    model = state_of(request).check_model(body.model, TAG)
    return JSONResponse({"model": model, "created_at": timestamp(), **empty, "done": True, "done_reason": "load"})


@router.post("/api/embed", openapi_extra=takes(EmbedBody))
async def embed(request: Request) -> Response:
    """A vector for each text."""
    state = state_of(request)
    body = await read_admitted(request, EmbedBody)
    model = state.check_model(body.model, TAG)
    name_request(body, request.headers)
    fields = EmbedBody.model_fields
    try:
        extras = extras_of(body, request.headers)
        extras.arguments |= state.models.arguments_of(model, TAG)
        if body.truncate is not False:
            extras.arguments.setdefault("tokenization_kwargs", {})["truncate_prompt_tokens"] = -1
        prompts = prompts_of(body.input, state.defaults.max_prompt_characters, None)
        if len(prompts) > MAX_N:
            raise InvalidParameterError(f"input: {len(prompts)} texts are more than {MAX_N}; send fewer at a time")
        params = PoolingParams(dimensions=body.dimensions)
        streams = await submitted(prompts, lambda prompt: state.llm.encode(prompt, params, **extras.arguments))
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, fields, "input") from error
    shape = EmbedShape(body, "embd")
    shape.model = model
    return PooledAnswer(state, shape, streams, fields, "input", {"x-request-id": shape.id, **extras.headers()})


class EmbedShape(PooledShape):
    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        ends = [output.metrics for output in outputs if output.metrics is not None]
        seconds = max((one.last_token_ts - one.arrival_time for one in ends if one.last_token_ts), default=0.0)
        return {
            "model": self.model,
            "embeddings": [output.outputs.array for output in outputs],
            "total_duration": max(0, int(seconds * 1e9)),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
        }


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """The model, by every name it is served under, and its adapters."""
    state = state_of(request)
    since = datetime.datetime.fromtimestamp(state.created, datetime.UTC).isoformat().replace("+00:00", "Z")
    details = {"parent_model": "", "format": "safetensors", "family": "", "families": None}
    details |= {"parameter_size": "", "quantization_level": ""}
    card = {"modified_at": since, "size": 0, "digest": "", "details": details}
    names = [name if ":" in name else name + TAG for name in (*state.models.names, *state.models.adapters)]
    return JSONResponse({"models": [{"name": name, "model": name, **card} for name in names]})


@router.get("/api/version")
async def version() -> Response:
    return JSONResponse({"version": __version__})
