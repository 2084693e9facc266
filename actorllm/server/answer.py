"""`Answer`: how a request's outputs reach its client, and what happens when the client leaves.

Invariants:

- the status is decided by the first output. So an impossible prompt, or an engine that is overloaded, is a 4xx or 5xx
  also when a stream was asked for;
- every output is one write, the last one with the end of the stream;
- a client that goes away is noticed while nothing is sent, too, and its requests are aborted at once.

Endpoints return an Answer; from there on it is on its own.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
from anyio import to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actorllm.client.stream import RequestStream
from actorllm.errors import ActorLLMError, RequestError
from actorllm.server.batch import MIN_THREADED, PORTION, collected, written
from actorllm.server.chunk_writer import WRITER, ChunkWriter
from actorllm.server.envelope import NOTHING_RENAMED, ApiError, error_of
from actorllm.server.guards import SEND, route_path
from actorllm.server.request_log import log_request, request_id
from actorllm.server.shape import Shape
from actorllm.server.state import ServerState
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import SamplingParams

logger = logging.getLogger(__name__)

JSON = b"application/json"


def _shown(value: str) -> bytes:
    """A header's value: what a client chose as the name of its request could end the line, and begin others."""
    return "".join([c if " " <= c <= "~" else "?" for c in value]).encode()


class Answer(Response, ABC):
    """To the client of one HTTP request, whose engine requests are `streams`, one per prompt."""

    def __init__(
        self,
        state: ServerState,
        name: str,
        streams: Sequence[RequestStream],
        fields: Container[str],
        prompt_field: str,
        headers: Mapping[str, str],
    ) -> None:
        """name: what the client calls the request. fields, prompt_field: of its body. headers: of the response."""
        self.background = None
        self.status_code = 200
        self._state = state
        self._name = name
        self._streams = streams
        self._fields = fields
        self._prompt_field = prompt_field
        self._more_headers = [(name.encode(), _shown(value)) for name, value in headers.items()]
        self._has_started = False
        self._error: Exception | None = None
        self._send_middle: Send
        self._writer: ChunkWriter | None = None
        self._path = ""
        self.params: SamplingParams | None = None
        """What was asked of the engine, for a trace."""
        self.renamed = NOTHING_RENAMED
        """Parameters by which other names the body has, as `Body.renamed`."""
        self._last_outputs: list[RequestOutput] = []
        """Of each prompt, with the ends of all its sequences."""

    def abort(self) -> None:
        """Of an answer that goes to no client: what it has asked of the engine ends."""
        for stream in self._streams:
            stream.abort()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = request_id.set(self._name)
        began = time.time()
        try:
            with self._state.under_way(self._name, self._streams):
                self._path = route_path(scope)
                self._send_middle, self._writer = scope.get(SEND, send), scope.get(WRITER)
                async with anyio.create_task_group() as group:
                    # In a task of its own: the loop resumes every coroutine that awaits another, for each token.
                    group.start_soon(self._respond_or_tell, send, group.cancel_scope)
                    await self._watch(receive, group.cancel_scope)
        finally:
            self._note(scope, began)
            request_id.reset(token)

    def _note(self, scope: Scope, began: float) -> None:
        """For the log of requests, and for traces."""
        state, outputs, error = self._state, self._last_outputs, self._error
        if state.logs_requests:
            log_request(scope["path"], time.time() - began, outputs, error)
        if state.tracing is not None:
            headers, model = scope["headers"], state.model_names[0]
            state.tracing.record(headers, self._name, model, self.params, began, time.time(), outputs, error)

    async def _respond_or_tell(self, send: Send, scope: anyio.CancelScope) -> None:
        try:
            await self._respond(send)
        except Exception as error:  # of one request: its client is told
            self._error = error
            await self._tell(error, send)
        scope.cancel()

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for stream in self._streams:
            stream.abort()
        scope.cancel()

    @abstractmethod
    async def _respond(self, send: Send) -> None: ...

    def _last_event(self, body: bytes) -> bytes:
        """The end of a response that has begun, and fails. body: the error as JSON."""
        return body

    async def _start(
        self, send: Send, status: int, content_type: bytes, more: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self._has_started = True
        headers = [(b"content-type", content_type), *self._more_headers, *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _tell(self, error: Exception, send: Send) -> None:
        """An error, as the response or as the last event of one that has begun."""
        if not isinstance(error, ApiError | ActorLLMError):
            logger.error("request %s failed", self._name, exc_info=error)
        elif not isinstance(error, RequestError):
            logger.warning("request %s failed: %s", self._name, error)
        told = error_of(error, self._fields, self._prompt_field, self.renamed)
        body = told.body(self._path, self._state.defaults.answers.error_format)
        if self._has_started:
            body = self._last_event(body)
        else:
            more = [(name.encode(), value.encode()) for name, value in told.headers().items()]
            await self._start(send, told.status, JSON, [*more, (b"content-length", b"%d" % len(body))])
        await send({"type": "http.response.body", "body": body, "more_body": False})


CHARACTERS_PER_ITEM = 64
"""Of a text that is looked through for thoughts and calls: so many take as long as what else counts as one item."""


def _num_items(output: RequestOutput) -> int:
    """Sequences, their text, and tokens that are written with their log-probabilities."""
    number = len(output.outputs) + _num_logprobs(output)
    return number + sum([len(one.text) for one in output.outputs]) // CHARACTERS_PER_ITEM


def _num_logprobs(output: RequestOutput) -> int:
    return len(output.prompt_logprobs or ()) + sum([len(one.logprobs or ()) for one in output.outputs])


async def _outputs_of(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


class TextAnswer(Answer):
    """Of generated text, as its shape writes it."""

    def __init__(
        self,
        state: ServerState,
        shape: Shape,
        streams: Sequence[RequestStream],
        fields: Container[str],
        prompt_field: str,
        headers: Mapping[str, str],
    ) -> None:
        """As those of Answer."""
        super().__init__(state, shape.id, streams, fields, prompt_field, headers)
        self._shape = shape

    def _last_event(self, body: bytes) -> bytes:
        return self._shape.failure(body)


class WholeAnswer(TextAnswer):
    """Everything at once. The streams are FINAL_ONLY."""

    async def _respond(self, send: Send) -> None:
        found = await collected(_outputs_of(stream) for stream in self._streams)
        outputs = self._last_outputs = list(itertools.chain.from_iterable(found))
        body = await written(self._shape.whole, outputs, sum(map(_num_items, outputs)))
        await self._start(send, 200, JSON, [(b"content-length", b"%d" % len(body))])
        await send({"type": "http.response.body", "body": body, "more_body": False})


class StreamedAnswer(TextAnswer):
    """Event by event."""

    async def _respond(self, send: Send) -> None:
        if len(self._streams) == 1:
            await self._pump(0, self._streams[0], send, is_alone=True)
            return
        failures: list[Exception] = []
        lock = anyio.Lock()

        async def send_alone(message: Any) -> None:
            async with lock:
                await send(message)

        async def pump(number: int, stream: RequestStream) -> None:
            try:
                await self._pump(number, stream, send_alone, is_alone=False)
            except Exception as error:  # of one stream: the others end with it, and it is raised behind the group
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for number, stream in enumerate(self._streams, 1):
                group.start_soon(pump, number - 1, stream)
                if number % PORTION == 0:
                    await anyio.lowlevel.checkpoint()  # else all of them begin in one turn of the loop
        if failures:
            raise failures[0]
        await self._write(send, self._shape.close(), is_last=True)

    async def _pump(self, number: int, stream: RequestStream, send: Send, is_alone: bool) -> None:
        """is_alone: the end of this stream is that of the answer."""
        shape = self._shape
        ended: list[CompletionOutput] = []
        async for output in stream:
            ended += [one for one in output.outputs if one.finish_reason is not None]
            is_last = is_alone and output.finished
            # The first events may hold all of the prompt, and those of many sequences.
            if shape.num_opening(number) + _num_logprobs(output) < MIN_THREADED:
                chunk = shape.events(number, output)
            else:
                chunk = await to_thread.run_sync(shape.events, number, output)
            if output.finished:
                ended.sort(key=lambda one: one.index)
                self._last_outputs.append(replace(output, outputs=ended))
            if is_last:
                chunk += shape.close()
            if chunk:
                await self._write(send, chunk, is_last)
            if shape.is_plain and not output.finished:
                await self._pump_deltas(number, stream, self._send_middle if is_alone else send, is_alone)

    async def _pump_deltas(self, number: int, stream: RequestStream, send: Send, is_alone: bool) -> None:
        """The long middle of a stream: text that becomes events without an output around it.

        Each delta is written by the callback that brings it, if the connection allows that. Otherwise this task sends it,
        and no callback writes meanwhile: chunks stay in order.
        """
        plain_events, take_deltas, writer = self._shape.plain_events, stream.take_deltas, self._writer

        def write_deltas() -> bool:
            assert writer is not None
            if not writer.is_ready:
                return False
            if deltas := take_deltas():
                writer.write(plain_events(number, deltas))
            return not stream.has_ended

        take = write_deltas if is_alone and writer is not None else None
        try:
            while (deltas := take_deltas()) is not None:
                stream.on_news(None)
                if deltas:
                    await send({"type": "http.response.body", "body": plain_events(number, deltas), "more_body": True})
                stream.on_news(take)
                await stream.wait()
        finally:
            stream.on_news(None)

    async def _write(self, send: Send, chunk: bytes, is_last: bool) -> None:
        if not self._has_started:
            more = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._start(send, 200, self._shape.CONTENT_TYPE, more)
        await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
