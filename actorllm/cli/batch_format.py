"""The OpenAI batch format: a line of JSON to a request, and its output to a line of JSON.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 8}}
    {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

A body is read, and answered, as the server reads and answers it at that url; it is never streamed. As in vLLM, the response of a
failed line has no body, and `error` is OpenAI's error object. Called by actorllm.cli.run_batch.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from actorllm.client.plugin_data import PluginData
from actorllm.config import ModelConfig
from actorllm.errors import EngineOverloaded, InvalidParameterError, RequestError, nearest_name
from actorllm.server import chat, completions
from actorllm.server.bodies.limits import refusal_of
from actorllm.server.completions import Asked
from actorllm.server.envelope import ApiError, error_of
from actorllm.server.protocol import Body, ChatCompletionRequest, CompletionRequest, Generation, checked
from actorllm.server.sampling import Defaults
from actorllm.server.served_models import ServedModels
from actorllm.server.vectors.asking import PooledAsked, prompt_field
from actorllm.server.vectors.asking import ask as ask_pooled
from actorllm.server.vectors.bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from actorllm.server.vectors.plugin_asking import ask_data

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    **dict.fromkeys(("/v1/score", "/score"), ScoreRequest),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RerankRequest),
    "/classify": ClassifyRequest,
    "/pooling": PoolingRequest,
}
"""What a line may ask, by its url."""

NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    body: Body
    asked: Asked | PooledAsked


def custom_id_of(line: bytes) -> str | None:
    """The id of a line, or None when it has none that can be read."""
    try:
        tree = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    found = tree.get("custom_id") if isinstance(tree, dict) else None
    return found if isinstance(found, str) else None


class BatchReader:
    """Lines for one model."""

    def __init__(
        self,
        model: ModelConfig,
        names: ServedModels,
        defaults: Defaults,
        decode: Callable[[list[int]], str],
        needed_plugin: Callable[[], PluginData],
    ) -> None:
        """names: what bodies may call the model. decode: ids to text. needed_plugin: that data are for, or raises RequestError."""
        self._model = model
        self._names = names
        self._defaults = defaults
        self._decode = decode
        self._needed_plugin = needed_plugin

    def read(self, line: bytes) -> BatchRequest:
        """A request, checked as far as it can be without the engine. Raises ApiError."""
        custom_id, url, tree = _envelope(line)
        kind = BODIES[url]
        refusal = refusal_of(tree, kind.TOKEN_FIELDS)
        if refusal is not None:
            raise ApiError(400, *refusal)
        body = checked(kind, tree)
        name = self._names.check(tree.get("model"))
        try:
            asked = self._asked(body, name)
            asked.extras.arguments |= self._names.arguments_of(name)
        except (RequestError, RecursionError) as error:
            raise refusal_of_error(error, body) from error
        return BatchRequest(custom_id, body, asked)

    def _asked(self, body: Body, name: str) -> Asked | PooledAsked:
        if isinstance(body, PoolingRequest) and body.data is not None:
            return ask_data(body, NO_HEADERS, self._needed_plugin, self._model)
        if isinstance(body, Pooled):
            return ask_pooled(body, NO_HEADERS, self._defaults, name, self._model)
        assert isinstance(body, Generation)
        if body.stream:
            raise ApiError(400, "stream=true: the responses of a batch are whole; leave it out", "stream")
        body.stream_options = None
        self._defaults.fill(body)
        if isinstance(body, ChatCompletionRequest):
            return chat.ask(body, NO_HEADERS, self._defaults, name, self._decode)
        assert isinstance(body, CompletionRequest)
        return completions.ask(body, NO_HEADERS, self._defaults, name, self._decode)


def _envelope(line: bytes) -> tuple[str, str, dict[str, Any]]:
    """What every line has. Raises ApiError."""
    try:
        tree = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the line is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ApiError(400, f"a line must be a JSON object, not {type(tree).__name__}")
    custom_id, url, body = tree.get("custom_id"), tree.get("url"), tree.get("body")
    if not isinstance(custom_id, str):
        raise ApiError(400, f"custom_id={custom_id!r:.80} must be a string")
    if tree.get("method") != "POST":
        raise ApiError(400, f"method={tree.get('method')!r:.80} must be 'POST'")
    if not isinstance(url, str) or url not in BODIES:
        near = nearest_name(str(url), BODIES)
        raise ApiError(400, f"url={url!r:.80} is not one of {', '.join(map(repr, BODIES))}{near}")
    if not isinstance(body, dict):
        raise ApiError(400, f"body={body!r:.80} must be an object")
    return custom_id, url, body


def success_line(request: BatchRequest, outputs: Sequence[Any]) -> bytes:
    """The line of a request whose prompts are all answered; outputs in the order of its prompts. Raises ApiError."""
    asked = request.asked
    body = asked.shape.body_of(outputs) if isinstance(asked, PooledAsked) else asked.shape.whole(outputs)
    response = {"status_code": 200, "request_id": _request_id(), "body": orjson.Fragment(body)}
    return _line(request.custom_id, response, None)


# Lines that failed


def refusal_of_error(error: BaseException, body: Body | None = None) -> ApiError:
    """What the line says of an error. body: of the line, where it has one that can be read.

    As over HTTP, but for what was turned away: a status of 500 or above says that the line is not to blame.
    """
    if isinstance(error, EngineOverloaded):
        return ApiError(503, str(error))
    if body is None:
        return error_of(error)
    if isinstance(body, Pooled):
        field = prompt_field(body)
    else:
        field = "messages" if isinstance(body, ChatCompletionRequest) else "prompt"
    return error_of(error, type(body).model_fields, field, body.renamed())


def repeated(custom_id: str | None) -> InvalidParameterError:
    return InvalidParameterError(f"custom_id={custom_id!r:.80} occurs in an earlier line too")


def error_line(custom_id: str | None, error: ApiError) -> bytes:
    """The line of a request that failed."""
    response = {"status_code": error.status, "request_id": _request_id(), "body": None}
    return _line(custom_id, response, error.tree())


def _request_id() -> str:
    return f"actorllm-batch-{uuid.uuid4().hex}"


def _line(custom_id: str | None, response: dict[str, Any], error: dict[str, Any] | None) -> bytes:
    tree = {"id": f"actorllm-{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(tree) + b"\n"
