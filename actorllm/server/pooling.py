"""`POST /v1/embeddings`, `/classify`, `/pooling`, `/v1/score` and `/v1/rerank`: vectors of texts, labels, and how alike texts are.

Bodies and answers are OpenAI's and vLLM's, the latter's being those of Jina and Cohere. One engine
request per text; what goes around them (status, disconnects, errors) is `answer`'s.
"""

from __future__ import annotations

import base64
import time
import uuid
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from fastapi import APIRouter, Request, Response
from starlette.types import Send

from actorllm.client.pooling_stream import PoolingStream
from actorllm.client.scoring import TextScoring, reads_pairs
from actorllm.errors import ActorLLMError, InvalidParameterError
from actorllm.intake.tokenization import Prompt
from actorllm.server.answer import JSON, Answer
from actorllm.server.batch import collected, submitted, written
from actorllm.server.completions import check_length, prompts_of
from actorllm.server.copies import check_readings, check_vectors
from actorllm.server.envelope import ApiError, error_of
from actorllm.server.operations import read_admitted, state_of, takes
from actorllm.server.protocol import Body, Many, Objective, Prompts
from actorllm.server.sampling import Extras, extras_of, name_request
from actorllm.server.shape import PromptState, Shape, metrics_of
from actorllm.server.state import ServerState
from actorllm.types.objective import SLO
from actorllm.types.outputs import RequestOutput
from actorllm.types.params import MAX_N, PoolingParams
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput

Asked: TypeAlias = "tuple[list[Prompt], PoolingParams, PooledShape]"
"""The prompts, how they are pooled, and the shape of the answer."""

router = APIRouter()

IDLE: dict[str, tuple[Any, ...]] = {
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "padding": (None, "do_not_pad"),
    "max_tokens_per_query": (None, 0),
    "max_tokens_per_doc": (None, 0),
    "instruction": (None,),
    "chat_template_kwargs": (None, {}),
}
"""Fields of vLLM that are accepted at these values, where they ask for what is done anyway."""


class Pooled(Body):
    """What all requests for vectors share."""

    model: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    pooling_type: str | None = None
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
    embed_dtype: str | None = None
    endianness: str | None = None
    padding: str | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(Pooled):
    """`POST /v1/embeddings`."""

    TOKEN_FIELDS = ("input",)

    input: Prompts
    encoding_format: str | None = None
    dimensions: int | None = None


class ClassifyRequest(Pooled):
    """`POST /classify`."""

    TOKEN_FIELDS = ("input",)

    input: Prompts


class PoolingRequest(Pooled):
    """`POST /pooling`: what `encode` gives, of any task."""

    TOKEN_FIELDS = ("input",)

    input: Prompts
    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


class ScoreRequest(Pooled):
    """`POST /v1/score`: two sides, by any of the pairs of names that vLLM knows; a text each, or one text and several."""

    text_1: str | Many[str] | None = None
    text_2: str | Many[str] | None = None
    queries: str | Many[str] | None = None
    documents: str | Many[str] | None = None
    items: str | Many[str] | None = None
    data_1: str | Many[str] | None = None
    data_2: str | Many[str] | None = None


class RerankRequest(Pooled):
    """`POST /v1/rerank`: documents, which are texts or objects with a text, by how alike the query they are."""

    query: str
    documents: str | Many[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None


BODIES = (EmbeddingRequest, ClassifyRequest, PoolingRequest, ScoreRequest, RerankRequest)

SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


@router.post("/v1/embeddings", openapi_extra=takes(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """A vector for each text."""
    body = await read_admitted(request, EmbeddingRequest)
    _check_format(body.encoding_format)

    def ask(characters: int, params: PoolingParams) -> Asked:
        prompts = prompts_of(body.input, characters, body.truncate_prompt_tokens)
        return prompts, params, EmbeddingShape(body, "embd")

    return await _answer(request, body, ask, "input", dimensions=body.dimensions, task="embed")


@router.post("/classify", openapi_extra=takes(ClassifyRequest))
async def classify(request: Request) -> Response:
    """The probabilities of a classifier's labels for each text."""
    body = await read_admitted(request, ClassifyRequest)
    pooler = state_of(request).engine.config.model.pooler
    labels = () if pooler is None or pooler.head is None else pooler.head.labels

    def ask(characters: int, params: PoolingParams) -> Asked:
        prompts = prompts_of(body.input, characters, body.truncate_prompt_tokens)
        return prompts, params, ClassifyShape(body, "classify", labels)

    return await _answer(request, body, ask, "input", task="classify")


@router.post("/pooling", openapi_extra=takes(PoolingRequest))
async def pool(request: Request) -> Response:
    """A vector for each text, or for each token of it."""
    body = await read_admitted(request, PoolingRequest)
    _check_format(body.encoding_format)

    def ask(characters: int, params: PoolingParams) -> Asked:
        prompts = prompts_of(body.input, characters, body.truncate_prompt_tokens)
        return prompts, params, PoolingShape(body, "pool")

    return await _answer(request, body, ask, "input", dimensions=body.dimensions, task=body.task)


def _check_format(encoding_format: str | None) -> None:
    if encoding_format not in (None, "float", "base64"):
        raise ApiError(400, f"encoding_format={encoding_format!r:.80} must be 'float' or 'base64'", "encoding_format")


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", openapi_extra=takes(ScoreRequest))
async def score(request: Request) -> Response:
    """How alike two texts are, or one text and each of several, or pairs of texts."""
    body = await read_admitted(request, ScoreRequest)
    pooler = state_of(request).engine.config.model.pooler
    sides = [names for names in SIDES if all(getattr(body, name) is not None for name in names)]
    if len(sides) != 1:
        told = "is needed" if not sides else "is needed, and there are more"
        raise ApiError(400, f"one of {', '.join(' and '.join(names) for names in SIDES)} {told}", SIDES[0][0])

    def ask(characters: int, params: PoolingParams) -> Asked:
        first, second = (_texts(getattr(body, name)) for name in sides[0])
        # Before pairs are made: where texts are joined, each pair has a copy of the query.
        if reads_pairs(pooler) and len(first) == 1:
            check_readings(first[0], len(second), sides[0][0])
        for text in [*first, *second] if body.truncate_prompt_tokens is None else ():
            check_length(text, characters)
        scoring = TextScoring.of(pooler, first, second, params)
        return scoring.prompts, scoring.params, ScoreShape(body, "score", scoring)

    return await _answer(request, body, ask, sides[0][0])


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", openapi_extra=takes(RerankRequest))
async def rerank(request: Request) -> Response:
    """Documents in the order of how alike the query they are."""
    body = await read_admitted(request, RerankRequest)
    if body.top_n is not None and body.top_n < 0:
        raise ApiError(400, f"top_n={body.top_n} must be at least 0, which is all of them", "top_n")
    given = body.documents
    documents = [given] if isinstance(given, str) else [_text_of(document) for document in given]
    pooler = state_of(request).engine.config.model.pooler

    def ask(characters: int, params: PoolingParams) -> Asked:
        if reads_pairs(pooler):
            check_readings(body.query, len(documents), "query")
        for text in [body.query, *documents] if body.truncate_prompt_tokens is None else ():
            check_length(text, characters)
        scoring = TextScoring.of(pooler, [body.query], documents, params)
        return scoring.prompts, scoring.params, RerankShape(body, "rerank", scoring, documents)

    return await _answer(request, body, ask, "documents")


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _text_of(document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise ApiError(
            400, "documents: an object needs a 'text'; documents of other kinds are not supported", "documents"
        )
    return text


async def _answer(request: Request, body: Pooled, ask: Any, prompt_field: str, **params: Any) -> Response:
    """ask: from the characters that a text may have and the parameters to what the engine is asked for."""
    state = state_of(request)
    model = state.check_model(body.model)
    name_request(body, request.headers)
    fields = type(body).model_fields
    try:
        extras = _extras(body, request)
        wanted = {name: getattr(body, name) for name in ("use_activation", "normalize", "pooling_type")}
        prompts, pooling, shape = ask(state.defaults.max_prompt_characters, PoolingParams(**wanted, **params))
        if len(prompts) > MAX_N:
            raise InvalidParameterError(
                f"{prompt_field}: {len(prompts)} texts are more than {MAX_N}; send fewer at a time"
            )
        config = state.engine.config.model
        if config.pooler is not None:
            kind = config.pooler.resolved(pooling.checked_copy(), config.name)
            if kind.is_of_tokens:
                check_vectors(prompts, kind.size, config.max_model_len, prompt_field)
        if body.cache_salt is not None:
            prompts = [_salted(prompt, body.cache_salt) for prompt in prompts]
        streams = await submitted(prompts, lambda prompt: state.llm.encode(prompt, pooling, **extras.arguments))
    except (ActorLLMError, RecursionError) as error:
        raise error_of(error, fields, prompt_field) from error
    shape.model, shape.slo = model, extras.slo
    told = {"x-request-id": shape.id, **extras.headers()}
    return PooledAnswer(state, shape, streams, fields, prompt_field, told)


def _extras(body: Pooled, request: Request) -> Extras:
    for name, accepted in IDLE.items():
        if getattr(body, name) not in accepted:
            shown = " or ".join(repr(value) for value in accepted if value is not None)
            instead = f"; leave it at {shown}" if shown else "; leave it out"
            raise ApiError(400, f"{name}={getattr(body, name)!r:.80} is not supported{instead}", name)
    extras = extras_of(body, request.headers)
    if body.truncation_side is not None:
        extras.arguments.setdefault("tokenization_kwargs", {})["truncation_side"] = body.truncation_side
    return extras


def _salted(prompt: Prompt, salt: str) -> Prompt:
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


class PooledAnswer(Answer):
    """Everything at once."""

    def __init__(
        self,
        state: ServerState,
        shape: PooledShape,
        streams: Sequence[PoolingStream],
        fields: Container[str],
        prompt_field: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(state, shape, [stream.request_stream for stream in streams], fields, prompt_field, headers)
        self._pooled_shape = shape
        self._pooled_streams = streams

    async def _respond(self, send: Send) -> None:
        outputs = await collected(anext(stream) for stream in self._pooled_streams)
        self._last_outputs = [s.last_output for s in self._pooled_streams if s.last_output is not None]
        num_vectors = sum(len(output.outputs.array) if output.outputs.array.ndim > 1 else 1 for output in outputs)
        body = await written(self._pooled_shape.body_of, outputs, num_vectors)
        await self._start(send, 200, JSON, [(b"content-length", b"%d" % len(body))])
        await send({"type": "http.response.body", "body": body, "more_body": False})


class PooledShape(Shape):
    """model, slo: set before the answer begins."""

    CONTENT_TYPE = JSON

    model = ""
    slo: SLO | None = None

    def __init__(self, body: Pooled, prefix: str) -> None:
        self.id = f"{prefix}-{body.request_id or uuid.uuid4().hex}"
        self._body = body
        self._created = int(time.time())

    def body_of(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> bytes:
        """outputs: of each text, in their order. Raises ApiError if one of them has no vector."""
        for output in outputs:
            if output.error is not None:
                raise ApiError(503, output.error.message)
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        tree = self._tree(outputs, {"prompt_tokens": num_tokens, "total_tokens": num_tokens})
        if self._body.return_metrics:
            tree["metrics"] = [
                metrics_of(PromptState(output.prompt_token_ids, metrics=output.metrics), self.slo) for output in outputs
            ]
        return orjson.dumps(tree, option=orjson.OPT_SERIALIZE_NUMPY)

    @abstractmethod
    def _tree(
        self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]
    ) -> dict[str, Any]: ...

    def _head(self, usage: dict[str, Any]) -> dict[str, Any]:
        usage = {**usage, "completion_tokens": 0, "prompt_tokens_details": None}
        return {"id": self.id, "object": "list", "created": self._created, "model": self.model, "usage": usage}

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        raise NotImplementedError("vectors are no text")

    def events(self, number: int, output: RequestOutput) -> bytes:
        raise NotImplementedError("vectors are not streamed")

    def close(self) -> bytes:
        raise NotImplementedError("vectors are not streamed")

    def failure(self, body: bytes) -> bytes:
        raise NotImplementedError("vectors are not streamed")


class EmbeddingShape(PooledShape):
    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        in_base64 = isinstance(self._body, EmbeddingRequest) and self._body.encoding_format == "base64"
        data = []
        for index, output in enumerate(outputs):
            vector = output.outputs.array
            shown: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector
            data.append({"index": index, "object": "embedding", "embedding": shown})
        return {**self._head(usage), "data": data}


class ClassifyShape(PooledShape):
    def __init__(self, body: ClassifyRequest, prefix: str, labels: Sequence[str]) -> None:
        super().__init__(body, prefix)
        self._labels = labels

    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        data = []
        for index, output in enumerate(outputs):
            probs = output.outputs.array
            label = self._labels[int(probs.argmax())]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": probs.size})
        return {**self._head(usage), "data": data}


class PoolingShape(PooledShape):
    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        in_base64 = isinstance(self._body, PoolingRequest) and self._body.encoding_format == "base64"
        data = []
        for index, output in enumerate(outputs):
            vector = output.outputs.array
            shown: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector
            data.append({"index": index, "object": "pooling", "data": shown})
        return {**self._head(usage), "data": data}


class ScoreShape(PooledShape):
    def __init__(self, body: Pooled, prefix: str, scoring: TextScoring) -> None:
        super().__init__(body, prefix)
        self._scoring = scoring

    def _scores(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> list[float]:
        return [output.outputs.score for output in self._scoring.outputs(outputs, None)]

    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(self._scores(outputs))]
        return {**self._head(usage), "data": data}


class RerankShape(ScoreShape):
    def __init__(self, body: RerankRequest, prefix: str, scoring: TextScoring, documents: list[str]) -> None:
        super().__init__(body, prefix, scoring)
        self._most = body.top_n or len(documents)
        self._shows_documents = body.return_documents is not False
        self._documents = documents

    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        results = []
        best_first = sorted(enumerate(self._scores(outputs)), key=lambda entry: -entry[1])
        for index, value in best_first[: self._most]:
            result: dict[str, Any] = {"index": index, "relevance_score": value}
            if self._shows_documents:
                result["document"] = {"text": self._documents[index], "multi_modal": None}
            results.append(result)
        return {"id": self.id, "model": self.model, "usage": usage, "results": results}
