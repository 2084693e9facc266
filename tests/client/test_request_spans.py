"""Spans of the engine itself: of each request, where an endpoint is given, or of those with `trace_headers`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from actorllm import AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from actorllm.actors.frontend import Delta
from actorllm.client import request_spans
from actorllm.client.stream import Mailbox
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, InvalidParameterError, InvalidPromptError
from actorllm.testing import ScriptedAnswer, ScriptedAsyncLLM

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Other": "left out"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Of the provider that the application has set."""
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return made


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    slow = {"Slowly": ScriptedAnswer("a b c d e f g", token_s=60.0)}
    engine = ScriptedAsyncLLM(lambda prompt: slow.get(prompt, "a b c d e f g"), max_model_len=64)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def until(condition: Callable[[], object]) -> None:
    """A span is made beside the stream, and may be there after its end."""
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_with_trace_headers_is_a_span_of_that_trace(
    llm: AsyncLLM, exporter: InMemorySpanExporter
) -> None:
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True, temperature=0.5, top_p=0.9)
    async for output in llm.generate("Once upon", params, "mine", trace_headers=HEADERS):
        last = output
    async for _ in llm.generate("Once upon", SamplingParams(max_tokens=2)):
        pass
    await until(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    assert span.name == "llm_request"
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    found = told(span)
    assert found["gen_ai.request.id"] == "mine"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.n"]) == (4, 2)
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert found["gen_ai.usage.prompt_tokens"] == len(last.prompt_token_ids or ())
    assert (found["gen_ai.usage.completion_tokens"], found["gen_ai.usage.num_sequences"]) == (8, 2)
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    times = {name.rpartition(".")[2]: value for name, value in found.items() if ".latency." in name}
    assert 0 <= times["time_in_queue"] <= times["time_to_first_token"] <= times["e2e"]
    assert times["time_in_model_prefill"] + times["time_in_model_decode"] == pytest.approx(
        times["time_in_model_inference"]
    )
    assert times["time_in_scheduler"] > 0
    assert 0 <= times["time_in_model_forward"] <= times["time_in_model_execute"]
    assert (span.start_time or 0) < (span.end_time or 0)


async def test_a_stream_that_is_dropped_as_its_end_comes_has_its_name(
    llm: AsyncLLM, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[object] = []
    right = Mailbox.push

    def push(mailbox: Mailbox, delta: Delta, index: int = 0) -> None:
        if delta.end is not None:
            streams.clear()  # a consumer cannot be quicker
        right(mailbox, delta, index)

    monkeypatch.setattr(Mailbox, "push", push)
    streams.append(llm.generate("Once", SamplingParams(max_tokens=3), "mine", trace_headers=HEADERS))
    await until(exporter.get_finished_spans)
    assert told(exporter.get_finished_spans()[0])["gen_ai.request.id"] == "mine"


async def test_a_stream_that_is_dropped_as_it_fails_has_its_name(
    llm: AsyncLLM, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[object] = []
    right = Mailbox.fail

    def fail(mailbox: Mailbox, error: BaseException) -> None:
        streams.clear()
        gc.collect()
        right(mailbox, error)

    monkeypatch.setattr(Mailbox, "fail", fail)
    streams.append(llm.generate({"prompt_token_ids": [1] * 99}, None, "mine", trace_headers=HEADERS))
    await until(exporter.get_finished_spans)
    assert told(exporter.get_finished_spans()[0])["gen_ai.request.id"] == "mine"


async def test_requests_that_are_refused_left_or_aborted_are_spans(
    llm: AsyncLLM, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(InvalidPromptError):
        async for _ in llm.generate({"prompt_token_ids": [1] * 99}, trace_headers=HEADERS):
            pass
    async with llm.generate("Slowly", SamplingParams(max_tokens=50), trace_headers=HEADERS) as stream:
        async for _ in stream:
            break
    await until(lambda: len(exporter.get_finished_spans()) == 2)
    failed, left = exporter.get_finished_spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert told(failed)["error.type"] == "InvalidPromptError"
    assert told(left)["gen_ai.response.finish_reasons"] == ("abort",)


async def test_an_exporter_that_raises_fails_no_request(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    class Broken(TracerProvider):
        def get_tracer(self, *arguments: Any, **more: Any) -> Any:
            raise RuntimeError("planted")

    monkeypatch.setattr(trace, "get_tracer_provider", Broken)
    outputs = [one async for one in llm.generate("Once", SamplingParams(max_tokens=3), trace_headers=HEADERS)]
    assert outputs[-1].finished
    await until(lambda: "the span of a request cannot be made" in caplog.text)


async def test_without_a_provider_it_is_said_once(llm: AsyncLLM, caplog: Any) -> None:
    for _ in range(2):
        async for _ in llm.generate("Once", SamplingParams(max_tokens=2), trace_headers=HEADERS):
            pass
    assert caplog.text.count("a request has trace_headers, and no span is made") == 1


async def test_wrong_headers_are_refused(llm: AsyncLLM) -> None:
    for wrong, match in (
        (5, "trace_headers=5 must be a mapping of text to text"),
        ({"traceparent": 5}, "must be a mapping of text to text"),
        ({"tracestate": "x" * 9000}, "tracestate has 9000 characters, and 8192 at most count"),
    ):
        with pytest.raises(InvalidParameterError, match=match):
            llm.generate("Once", trace_headers=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="otlp_traces_endpoint='here' must be an address"):
        EngineConfig.from_arguments("storyteller", otlp_traces_endpoint="here")


def test_all_requests_of_an_engine_with_an_endpoint_are_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = InMemorySpanExporter(), []

    def provider(endpoint: str, service: dict[str, str]) -> TracerProvider:
        asked.append(endpoint)
        found = TracerProvider()
        found.add_span_processor(BatchSpanProcessor(made))
        return found

    monkeypatch.setattr(request_spans, "otlp_provider", provider)
    endpoint = "http://127.0.0.1:4318/v1/traces"
    engine = LLMEngine.from_engine_args(
        EngineArgs("storyteller", dtype="float32", topology="inline", num_threads=1, otlp_traces_endpoint=endpoint)
    )
    engine.add_request("traced", "Once", SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    engine.shutdown()
    (span,) = made.get_finished_spans()
    assert asked == [endpoint]
    assert told(span)["gen_ai.request.id"] == "traced"
    assert told(span)["gen_ai.latency.time_in_model_execute"] > 0
