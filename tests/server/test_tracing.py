"""Spans and log lines about requests."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from actorllm import AsyncLLM
from actorllm.errors import InvalidPromptError
from actorllm.server import create_app
from actorllm.server.request_log import RequestIdFilter, log_request
from tests.server.conftest import client_of

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "seed": 7}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_is_a_span_of_its_callers_trace(llm: AsyncLLM, stream: bool) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with client_of(create_app(llm, tracer_provider=provider)) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {**BODY, "n": 2, "stream": stream, "request_id": "a"}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        chat = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 1, "stream": stream}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        refused = await client.post("/v1/completions", json={"prompt": [1] * 5000, "stream": stream})
        assert refused.status_code == 400
    span, talk, failure = exporter.get_finished_spans()
    assert (span.name, span.kind) == ("text_completion storyteller", SpanKind.SERVER)
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    told = dict(span.attributes or {})
    assert told["gen_ai.response.id"] == "cmpl-a"
    assert (told["gen_ai.request.model"], told["gen_ai.request.temperature"]) == ("storyteller", 0.5)
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.choice.count"], told["gen_ai.request.seed"]) == (
        5,
        2,
        7,
    )
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 10)
    assert told["gen_ai.response.finish_reasons"] == ("length", "length")
    first, whole = told["gen_ai.latency.time_to_first_token"], told["gen_ai.latency.e2e"]
    assert 0 < told["actorllm.latency.time_in_intake"] <= first <= whole
    assert 0 < told["gen_ai.latency.time_in_queue"] <= first
    assert [event.name for event in span.events] == ["queued", "scheduled", "first_token", "last_token"]
    times = [_start(span), *[event.timestamp for event in span.events], span.end_time or 0]
    assert times[1:] == sorted(times[1:])
    assert talk.name == "chat storyteller"
    assert talk.parent is None
    assert failure.status.status_code is StatusCode.ERROR
    assert (failure.attributes or {})["error.type"] == "InvalidPromptError"


async def test_a_refused_request_is_a_span(llm: AsyncLLM) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    refused = [
        ("/v1/completions", b'{"prompt": 3}', 400, "InvalidPromptError"),
        ("/v1/chat/completions", b'{"messages": ', 400, "BadRequestError"),
        ("/v1/responses", b'{"input": "a", "model": "king"}', 404, "NotFoundError"),
        ("/v1/embeddings", b'{"input": "a"}', 400, "InvalidParameterError"),
        ("/generate", b"x" * 9000, 413, "RequestTooLargeError"),
    ]
    app = create_app(llm, tracer_provider=provider, max_body_bytes=8000)
    async with client_of(app) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        for path, body, status, _ in refused:
            assert (await client.post(path, content=body, headers=headers)).status_code == status
        assert (await client.post("/tokenize", json={})).status_code == 400
    async with client_of(create_app(llm, tracer_provider=provider, api_key="a")) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 401
    *spans, unknown = exporter.get_finished_spans()
    told = [(span.attributes or {}) for span in spans]
    assert [(one["http.response.status_code"], one["error.type"]) for one in told] == [line[2:] for line in refused]
    operations = ["text_completion", "chat", "chat", "embeddings", "text_completion"]
    assert [one["gen_ai.operation.name"] for one in told] == operations
    for span in spans:
        assert span.status.status_code is StatusCode.ERROR
        assert f"{span.context.trace_id:032x}" == TRACE
        assert 0 < _start(span) <= (span.end_time or 0)
    assert (unknown.attributes or {})["error.type"] == "AuthenticationError"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_all_sequences_are_in_it_whenever_they_ended(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    body = {"prompt": "Once upon a time", "n": 6, "max_tokens": 12, "seed": 3, "stop": ["a"], "stream": stream}
    with caplog.at_level(logging.INFO, "actorllm"):
        async with client_of(create_app(llm, tracer_provider=provider, enable_log_requests=True)) as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    (span,) = exporter.get_finished_spans()
    reasons = (span.attributes or {})["gen_ai.response.finish_reasons"]
    assert isinstance(reasons, tuple)
    assert len(reasons) == 6
    assert f"({', '.join(map(str, reasons))})" in caplog.text


def _start(span: ReadableSpan) -> int:
    return span.start_time or 0


async def test_lines_of_the_log_say_which_request_they_are_about(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.addFilter(RequestIdFilter())
    with caplog.at_level(logging.INFO, "actorllm"):
        async with client_of(create_app(llm, enable_log_requests=True)) as client:
            for stream in (False, True):
                body = {**BODY, "request_id": "b", "stream": stream}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await client.post("/v1/completions", json={"prompt": [1] * 5000})).status_code == 400
    lines = [record for record in caplog.records if record.name == "actorllm.server.request_log"]
    assert [record.__dict__["request_id"] for record in lines[:2]] == ["cmpl-b", "cmpl-b"]
    for record in lines[:2]:
        assert "/v1/completions: 3 prompt tokens, 5 output tokens (length)" in record.getMessage()
        assert record.__dict__["request"] == "[cmpl-b] "
    assert "InvalidPromptError" in lines[2].getMessage()
    logging.getLogger("actorllm").info("outside")


async def test_what_a_client_writes_begins_no_line_of_the_log(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise LookupError

    with caplog.at_level(logging.INFO, "actorllm"):
        log_request("/x", 0.1, [], InvalidPromptError("a\nINFO: all is well\x1b[2J"))
        monkeypatch.setattr("actorllm.server.state.ServerState.check_model", fails)
        async with client_of(create_app(llm)) as client:
            assert (await client.get("/v1/models/a%0DINFO:%1B[2J")).status_code == 500
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("actorllm.server")]
    assert len(messages) == 2
    assert all(message.isprintable() for message in messages)
