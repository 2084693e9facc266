"""`POST /v1/embeddings`, `/classify`, `/pooling`, `/v1/score` and `/v1/rerank`.

One engine request per text; what goes around them (status, disconnects, errors) is `answer`'s.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from fastapi import APIRouter, Request, Response
from starlette.types import Send

from actorllm.client.pooling_stream import PoolingStream
from actorllm.errors import ActorLLMError
from actorllm.server.answer import JSON, Answer
from actorllm.server.batch import collected, submitted, written
from actorllm.server.envelope import error_of
from actorllm.server.operations import read_admitted, state_of, takes
from actorllm.server.sampling import name_request
from actorllm.server.state import ServerState
from actorllm.server.vectors.asking import AnswerShape, ask, pooled_extras, prompt_field, salted
from actorllm.server.vectors.bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from actorllm.server.vectors.plugin_answer import PluginAnswer, plugin_asked
from actorllm.server.vectors.plugin_asking import FIELD, name_of

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=takes(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """A vector for each text."""
    return await _answer(request, EmbeddingRequest)


@router.post("/classify", openapi_extra=takes(ClassifyRequest))
async def classify(request: Request) -> Response:
    """The probabilities of a classifier's labels for each text."""
    return await _answer(request, ClassifyRequest)


@router.post("/pooling", openapi_extra=takes(PoolingRequest))
async def pool(request: Request) -> Response:
    """A vector for each text, or for each token of it."""
    body = await read_admitted(request, PoolingRequest)
    return await (_answer_as(body, request) if body.data is None else _plugin_answer(body, request))


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", openapi_extra=takes(ScoreRequest))
async def score(request: Request) -> Response:
    """How alike two texts are, or one text and each of several, or pairs of texts."""
    return await _answer(request, ScoreRequest)


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", openapi_extra=takes(RerankRequest))
async def rerank(request: Request) -> Response:
    """Documents in the order of how alike the query they are."""
    return await _answer(request, RerankRequest)


async def _answer(request: Request, model: type[Pooled]) -> Response:
    return await _answer_as(await read_admitted(request, model), request)


async def _plugin_answer(body: PoolingRequest, request: Request) -> Response:
    state = state_of(request)
    name = state.check_model(body.model)
    name_request(body, request.headers)
    fields, called = type(body).model_fields, name_of(body)
    try:
        extras = pooled_extras(body, request.headers)
        extras.arguments |= state.models.arguments_of(name)
        prompts, params = await plugin_asked(body, called, state)
        if body.cache_salt is not None:
            prompts = [salted(prompt, body.cache_salt) for prompt in prompts]
        asked = iter(params)
        streams = await submitted(prompts, lambda prompt: state.llm.encode(prompt, next(asked), **extras.arguments))
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, fields, FIELD) from error
    return PluginAnswer(state, called, streams, fields, {"x-request-id": called, **extras.headers()})


async def _answer_as(body: Pooled, request: Request) -> Response:
    state = state_of(request)
    name = state.check_model(body.model)
    name_request(body, request.headers)
    fields, field = type(body).model_fields, prompt_field(body)
    try:
        asked = ask(body, request.headers, state.defaults, name, state.engine.config.model)
        asked.extras.arguments |= state.models.arguments_of(name)
        params = iter(asked.params)
        streams = await submitted(
            asked.prompts, lambda prompt: state.llm.encode(prompt, next(params), **asked.extras.arguments)
        )
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, fields, field) from error
    told = {"x-request-id": asked.shape.id, **asked.extras.headers()}
    return PooledAnswer(state, asked.shape, streams, fields, field, told)


class PooledAnswer(Answer):
    """Everything at once."""

    def __init__(
        self,
        state: ServerState,
        shape: AnswerShape,
        streams: Sequence[PoolingStream],
        fields: Container[str],
        prompt_field: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(state, shape.id, [stream.request_stream for stream in streams], fields, prompt_field, headers)
        self._shape = shape
        self._pooled_streams = streams

    async def _respond(self, send: Send) -> None:
        outputs = await collected(anext(stream) for stream in self._pooled_streams)
        self._last_outputs = [s.last_output for s in self._pooled_streams if s.last_output is not None]
        num_vectors = sum(len(output.outputs.array) if output.outputs.array.ndim > 1 else 1 for output in outputs)
        body = await written(self._shape.body_of, outputs, num_vectors)
        await self._start(send, 200, JSON, [(b"content-length", b"%d" % len(body))])
        await send({"type": "http.response.body", "body": body, "more_body": False})
