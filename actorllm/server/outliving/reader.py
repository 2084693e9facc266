"""The writer of an `EventRecord` and its readers: `EventRecorder` is the client of an answer, `Reader` the answer to a client.

A stream that outlives its readers is an ordinary streamed answer whose client is a record. It goes on without readers. A reader
gets what is recorded, from any number on, and waits for more.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import anyio
import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from actorllm.server.envelope import ApiError
from actorllm.server.outliving.record import EventRecord
from actorllm.server.shape import DONE, Shape

STREAMED = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""Headers of a stream of events."""
RESPONSE = "resp_"
"""What the names of responses begin with. Other streams are those of chats and completions."""
UNAVAILABLE = {"message": "the server is about to end", "type": "ServiceUnavailableError", "param": None, "code": 503}


class Readable(Protocol):
    """Events, here or in another process."""

    id: str
    """What the client is told that the stream is called."""

    def being_read(self) -> AbstractContextManager[None]: ...

    async def read_behind(self, number: int) -> tuple[bytes, int, bool]:
        """Those behind that number, that of the last one, and whether that is all. Raises ApiError."""


class EventRecorder:
    """The client of an answer that goes on without one."""

    def __init__(self, shape: Shape, record: EventRecord, *, tells_refusals: bool) -> None:
        """tells_refusals: an answer that is an error from the start becomes no events: `refused` has it."""
        self._shape = shape
        self._record = record
        self._tells_refusals = tells_refusals
        self._status = 200
        self._headers: list[tuple[bytes, bytes]] = []
        self.refused: Response | None = None
        self.has_begun = anyio.Event()
        """Its status is known."""
        self.is_whole = False

    async def receive(self) -> Message:
        await anyio.sleep_forever()
        raise AssertionError("it never leaves")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
            return
        if self._status == 200:
            self.is_whole |= not message["more_body"]
            self._record.add(message["body"])
        elif self._tells_refusals:
            self.is_whole = True
            self.refused = Response(message["body"], self._status)
            self.refused.raw_headers = self._headers
        else:
            self.fail(message["body"])
        self.has_begun.set()

    def end(self) -> None:
        """Nothing more is sent."""
        if not self.is_whole:
            self.fail(orjson.dumps({"error": UNAVAILABLE}))
        self.has_begun.set()

    def fail(self, body: bytes) -> None:
        """An error, which becomes the last event. body: in OpenAI's envelope."""
        self.is_whole = True
        self._record.add(self._shape.failure(body))


class Reader(Response):
    """The events of a record from one on, until its end."""

    def __init__(self, record: Readable, after: int, headers: Mapping[str, str]) -> None:
        self._record = record
        self._after = after
        self.background = None
        self.status_code = 200
        self.raw_headers = [(name.encode(), value.encode()) for name, value in {**STREAMED, **headers}.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, receive, group.cancel_scope)
            with self._record.being_read():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._read(send, scope)
            group.cancel_scope.cancel()

    async def _read(self, send: Send, scope: Scope) -> None:
        is_over = False
        while not is_over:
            try:
                chunk, self._after, is_over = await self._record.read_behind(self._after)
            except ApiError as error:  # this client reads more slowly than events come, or their process has ended
                chunk, is_over = self._failure(error, scope), True
            if chunk or is_over:
                await send({"type": "http.response.body", "body": chunk, "more_body": not is_over})

    def _failure(self, error: ApiError, scope: Scope) -> bytes:
        """The last event, in the form of the API of this stream."""
        if self._record.id.startswith(RESPONSE):
            told = {"type": "error", "code": "server_error", "message": error.message, "param": None}
            return b"event: error\ndata: %b\n\n" % orjson.dumps({**told, "sequence_number": self._after + 1})
        answers = scope["app"].state.server.defaults.answers
        return b"data: %b\n\n" % error.body(error_format=answers.error_format) + DONE

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
