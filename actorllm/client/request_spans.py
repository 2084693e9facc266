"""`RequestSpans`: an OpenTelemetry span for each request that an engine was given. Extra `actorllm[otel]`.

Where they go is said by `otlp_traces_endpoint`, which traces all requests. Without it, those with `trace_headers` go to the tracer
provider of the application, if it has set one. A span is made when its request has ended, from the times that the engine has kept.
So a request that is not traced costs nothing. Names are vLLM's: the span is "llm_request". OpenTelemetry is imported here only
where it is used. On any thread; a span that cannot be made is logged, and its request does not notice.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from actorllm.client.stream import Mailbox, RequestStream
from actorllm.clock import to_epoch
from actorllm.errors import ConfigError, InvalidParameterError, shown

logger = logging.getLogger(__name__)

HEADERS = ("traceparent", "tracestate", "baggage")
MAX_HEADER = 8192
"""Characters of one of them."""


def checked_trace_headers(given: object) -> dict[str, str] | None:
    """Those that say which trace a request belongs to. Raises InvalidParameterError."""
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in given.items()):
        raise InvalidParameterError(
            f"trace_headers={shown(given)} must be a mapping of text to text, such as {{'traceparent': ...}}"
        )
    found = {name.lower(): value for name, value in given.items() if name.lower() in HEADERS}
    for name, value in found.items():
        if len(value) > MAX_HEADER:
            raise InvalidParameterError(
                f"trace_headers: {name} has {len(value)} characters, and {MAX_HEADER} at most count"
            )
    return found


def otlp_provider(endpoint: str, service: Mapping[str, str]) -> Any:
    """A provider that sends its spans there over HTTP. Raises ConfigError when the packages are not there."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(f"tracing needs more packages ({error.name}): pip install 'actorllm[otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "actorllm", **service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class RequestTrace(NamedTuple):
    """What a request brings for its span."""

    headers: Mapping[str, str] | None = None
    """As checked; None: it has none."""
    params: object = None


NO_TRACE = RequestTrace()


class RequestSpans:
    """Of one engine."""

    def __init__(self, endpoint: str | None, model: str) -> None:
        """endpoint: None: the provider of the application. Raises ConfigError when the packages are not there."""
        self._model = model
        self._own = None if endpoint is None else otlp_provider(endpoint, {})
        self._has_told = False

    def mailbox(self, trace: RequestTrace, arrival: float, *arguments: Any) -> Mailbox:
        """For the outputs of a request. arrival: in monotonic seconds. arguments: of Mailbox."""
        provider = self._own
        if provider is None and trace.headers is not None:
            provider = _provider_of_application()
            if provider is None and not self._has_told:
                self._has_told = True
                logger.warning(
                    "a request has trace_headers, and no span is made: give the engine otlp_traces_endpoint, or set a tracer "
                    "provider of OpenTelemetry"
                )
        return Mailbox(*arguments) if provider is None else TracedMailbox(self, provider, trace, arrival, *arguments)

    def record(self, request: TracedMailbox) -> None:
        """A request has ended."""
        try:
            self._record(request)
        except Exception:  # of an exporter, or of a sampler of the application: no request may end of it
            logger.exception("the span of a request cannot be made")

    def _record(self, request: TracedMailbox) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        tracer = request.provider.get_tracer("actorllm")
        stream, ended = request.stream() if request.stream is not None else None, time.time()
        attributes: dict[str, Any] = {"gen_ai.response.model": self._model, **_asked(request.params), **_spent(request)}
        if stream is not None:
            attributes["gen_ai.request.id"] = stream.request_id
            attributes["gen_ai.usage.prompt_tokens"] = len(stream.prompt_token_ids)
        span = tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(request.headers),
            kind=SpanKind.SERVER,
            start_time=int(to_epoch(request.arrival) * 1e9),
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        if request.error is not None:
            span.set_attribute("error.type", type(request.error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(request.error)))
        span.end(int(ended * 1e9))

    def close(self) -> None:
        """Send what is there, and stop. Idempotent."""
        own, self._own = self._own, None
        if own is not None:
            own.shutdown()


class TracedMailbox(Mailbox):
    """Of a request that becomes a span at its end."""

    __slots__ = ("_spans", "arrival", "ends", "headers", "num_tokens", "params", "provider")

    def __init__(
        self,
        spans: RequestSpans,
        provider: Any,
        trace: RequestTrace,
        arrival: float,
        *arguments: Any,
    ) -> None:
        """As `RequestSpans.mailbox`. provider: of tracers."""
        super().__init__(*arguments)
        self._spans: RequestSpans | None = spans
        self.provider = provider
        self.headers = trace.headers or {}
        self.params = trace.params
        self.arrival = arrival
        self.num_tokens = 0
        self.ends: list[Any] = []

    def push(self, delta: Any, index: int = 0) -> None:
        held = self._held()
        self.num_tokens += len(delta.tokens)
        if delta.end is not None:
            self.ends.append(delta.end)
        super().push(delta, index)
        del held

    def fail(self, error: BaseException) -> None:
        held = self._held()
        super().fail(error)
        del held

    def _held(self) -> RequestStream | None:
        """The stream, which has the name of the span: a quick consumer would drop it before the span is made."""
        return None if self.stream is None else self.stream()

    def _release(self) -> None:
        super()._release()
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.record(self)


def _provider_of_application() -> Any:
    """None: it has set none, and its spans would go nowhere."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider) else provider


def _asked(params: Any) -> dict[str, Any]:
    temperature, top_p = getattr(params, "temperature", None), getattr(params, "top_p", None)
    return {
        "gen_ai.request.max_tokens": getattr(params, "max_tokens", None),
        "gen_ai.request.temperature": None if temperature is None else float(temperature),
        "gen_ai.request.top_p": None if top_p is None else float(top_p),
        "gen_ai.request.n": getattr(params, "n", None),
    }


def _spent(request: TracedMailbox) -> dict[str, Any]:
    """Of several sequences the times of the slowest one, from the first of the events."""
    told: dict[str, Any] = {"gen_ai.usage.completion_tokens": request.num_tokens}
    ends = request.ends
    if not ends:
        return told
    queued = min(end.queued for end in ends)
    scheduled, first, last = (
        [at for end in ends if (at := getattr(end, name)) is not None]
        for name in ("scheduled", "first_token", "last_token")
    )
    told |= {
        "gen_ai.usage.num_sequences": len(ends),
        "gen_ai.response.finish_reasons": [end.reason for end in ends],
        "gen_ai.latency.e2e": max(last) - request.arrival if last else None,
        "gen_ai.latency.time_to_first_token": min(first) - request.arrival if first else None,
        "gen_ai.latency.time_in_queue": min(scheduled) - queued if scheduled else None,
        "gen_ai.latency.time_in_scheduler": max(end.planning_s for end in ends),
        "gen_ai.latency.time_in_model_forward": max(end.forward_s for end in ends),
        "gen_ai.latency.time_in_model_execute": max(end.execution_s for end in ends),
    }
    if scheduled and first and last:
        told["gen_ai.latency.time_in_model_prefill"] = min(first) - min(scheduled)
        told["gen_ai.latency.time_in_model_decode"] = max(last) - min(first)
        told["gen_ai.latency.time_in_model_inference"] = max(last) - min(scheduled)
    return told
