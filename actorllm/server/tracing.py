"""`Tracing`: one OpenTelemetry span per HTTP request for text or vectors, by the GenAI conventions. Extra `actorllm[otel]`.

A span is made when its request has ended, from the times that the engine has kept. A request that is not traced costs nothing,
and one that is traced costs nothing while it runs. The trace of the caller (W3C `traceparent`) goes on. Imported only where
there is a tracer provider (`create_app(tracer_provider=...)`, `actorllm serve --otlp-traces-endpoint`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actorllm import __version__
from actorllm.errors import ActorLLMError
from actorllm.server.envelope import KINDS, MAX_MESSAGE, ApiError
from actorllm.server.guards import BEGAN, route_path
from actorllm.types.outputs import RequestOutput
from actorllm.types.params import SamplingParams
from actorllm.types.request_metrics import RequestMetrics

OPERATIONS = {
    "chatcmpl": "chat",
    "cmpl": "text_completion",
    **dict.fromkeys(("resp", "msg"), "chat"),
    **dict.fromkeys(("embd", "classify", "pool", "score", "rerank"), "embeddings"),
}
"""By the prefix of the id that a client is told."""

OPERATIONS_OF_PATHS = {
    **dict.fromkeys(("/v1/completions", "/generate", "/api/generate", "/inference/v1/generate"), "text_completion"),
    **dict.fromkeys(
        ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/v1/chat/completions/batch"), "chat"
    ),
    **dict.fromkeys(
        (
            "/v1/embeddings",
            "/api/embed",
            "/classify",
            "/pooling",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
        ),
        "embeddings",
    ),
}
"""Of a request that was refused before it had an id. Other paths have no spans."""


class Tracing:
    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("actorllm", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        request_id: str,
        model: str,
        params: SamplingParams | None,
        began: float,
        ended: float,
        outputs: Sequence[RequestOutput],
        error: Exception | None,
    ) -> None:
        """A request has ended. outputs: the last one of each of its prompts; none of one that the client has left.

        began, ended: epoch seconds.
        """
        operation = OPERATIONS.get(request_id.replace("_", "-").partition("-")[0], "text_completion")
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "actorllm",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": request_id,
            **_asked(params),
            **_used(outputs, metrics),
        }
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._context_of(headers),
            kind=SpanKind.SERVER,
            start_time=_ns(began),
            attributes=attributes,
        )
        for name, at in _events(metrics):
            span.add_event(name, timestamp=_ns(at))
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        elif not outputs:
            span.set_attribute("error.type", "client_disconnected")
        span.end(_ns(ended))

    def record_refusal(self, scope: Mapping[str, Any], model: str, told: ApiError, error: Exception) -> None:
        """A request was answered with an error before the engine had it."""
        operation = OPERATIONS_OF_PATHS.get(route_path(scope))
        if operation is None:
            return
        ended = time.time()
        cause = error.__cause__ if isinstance(error.__cause__, ActorLLMError) else error
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._context_of(scope["headers"]),
            kind=SpanKind.SERVER,
            start_time=_ns(scope.get(BEGAN, ended)),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "actorllm",
                "gen_ai.request.model": model,
                "http.response.status_code": told.status,
                "error.type": KINDS.get(told.status, "APIError") if cause is told else type(cause).__name__,
            },
        )
        span.set_status(Status(StatusCode.ERROR, told.message[:MAX_MESSAGE]))
        span.end(_ns(ended))

    def _context_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Context:
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        return self._propagator.extract(carrier)


def _asked(params: SamplingParams | None) -> dict[str, Any]:
    if params is None:
        return {}
    asked = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.presence_penalty": float(params.presence_penalty),
        "gen_ai.request.frequency_penalty": float(params.frequency_penalty),
    }
    return {name: value for name, value in asked.items() if value is not None}


def _used(outputs: Sequence[RequestOutput], metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    if not outputs:
        return {}
    used: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "gen_ai.usage.output_tokens": sum(one.num_generation_tokens for one in metrics),
        "gen_ai.usage.cache_read.input_tokens": sum(one.num_cached_tokens for one in metrics),
        "gen_ai.response.finish_reasons": [
            one.finish_reason for output in outputs for one in output.outputs if one.finish_reason is not None
        ],
    }
    latencies: dict[str, list[float | None]] = {
        "actorllm.latency.time_in_intake": [one.intake_time for one in metrics],
        "gen_ai.latency.time_in_queue": [one.queue_time for one in metrics],
        "gen_ai.latency.time_to_first_token": [one.time_to_first_token for one in metrics],
        "gen_ai.latency.e2e": [one.last_token_ts - one.arrival_time for one in metrics if one.last_token_ts],
    }
    # Of several outputs the slowest one: the span is that of the whole HTTP request.
    for name, values in latencies.items():
        known = [value for value in values if value is not None]
        if known:
            used[name] = max(known)
    used["actorllm.num_preemptions"] = sum(one.num_preemptions for one in metrics)
    used["actorllm.num_recoveries"] = sum(one.num_recoveries for one in metrics)
    return used


def _events(metrics: Sequence[RequestMetrics]) -> list[tuple[str, float]]:
    """What happened first in any of the prompts, and in the end."""
    times = {
        "queued": [one.queued_ts for one in metrics],
        "scheduled": [one.scheduled_ts for one in metrics],
        "first_token": [one.first_token_ts for one in metrics],
        "last_token": [-one.last_token_ts for one in metrics],
    }
    return [(name, abs(min(known))) for name, found in times.items() if (known := [at for at in found if at])]


def _ns(epoch_s: float) -> int:
    return int(epoch_s * 1e9)
