"""What becomes of each field that a client may send: the tables that the endpoints use, in words for docs/compatibility.md.

Called by the generator of that page and by its test; no request comes here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actorllm.server.anthropic.blocks import MessagesRequest
from actorllm.server.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from actorllm.server.responses import request as responses
from actorllm.server.responses.request import ResponsesRequest
from actorllm.server.sampling import IDLE, NOT_HONOURED, WITHOUT_EFFECT
from actorllm.server.tokens import inference
from actorllm.server.tokens.inference import InferenceRequest
from actorllm.server.vectors import bodies as vectors
from actorllm.types.params import VLLM_PARAMETERS

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/embeddings": vectors.EmbeddingRequest,
    "/classify": vectors.ClassifyRequest,
    "/pooling": vectors.PoolingRequest,
    "/score": vectors.ScoreRequest,
    "/rerank": vectors.RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/inference/v1/generate": InferenceRequest,
}
"""By the endpoint whose body it is."""

TAKEN, REFUSED, NOTED = "taken", "refused", "noted"
READ_WHOLE = (TokenizeRequest, DetokenizeRequest)
"""Bodies that know their own fields only, and say nothing of others."""


def treatments(body: type[Body], names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """For each of these fields: taken, refused but at some values, or noted in a warning; and what is to be said of it."""
    return {name: _treatment(body, name) for name in names}


def _treatment(body: type[Body], name: str) -> tuple[str, str]:
    if body is ResponsesRequest and name in responses.NOT_HERE:
        return REFUSED, accepted_at((None, False, 1) if name in ("n", "best_of") else (None, False))
    if body is ResponsesRequest and name == "max_tokens":
        return REFUSED, "called `max_output_tokens` in this API"
    if body is MessagesRequest and name not in body.model_fields:
        return _treatment(ChatCompletionRequest, name)  # what it does not know itself goes on to that one
    if body in READ_WHOLE and name not in body.model_fields:
        return NOTED, "no effect: what is read is text"
    if name in body.model_fields:
        idle = VLLM_PARAMETERS if name in ("length_penalty", "use_beam_search") else vectors.IDLE
        is_idle = name in idle and (idle is VLLM_PARAMETERS or issubclass(body, vectors.Pooled))
        return (REFUSED, accepted_at(idle[name])) if is_idle else (TAKEN, "")
    if body is InferenceRequest and name in inference.NOT_HERE:
        return REFUSED, accepted_at((None,))
    if name in IDLE:
        return REFUSED, accepted_at(IDLE[name])
    if name in WITHOUT_EFFECT:
        return NOTED, "it asks nothing of an engine that keeps no accounts and calls no tools"
    if name in NOT_HONOURED:
        return (
            NOTED,
            f"taken with a warning, but for {values_of(NOT_HONOURED[name])}: the answer is the same without it",
        )
    return NOTED, "not known here: it has no effect, and a warning says so"


def accepted_at(values: Iterable[Any]) -> str:
    return f"accepted at {values_of(values)}"


def values_of(values: Iterable[Any]) -> str:
    """As JSON has them."""
    shown = {None: "null", True: "true", False: "false"}
    texts = [shown[one] if one is None or isinstance(one, bool) else repr(one).replace("'", '"') for one in values]
    return " or ".join(f"`{text}`" for text in texts)
