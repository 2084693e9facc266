"""`KeptResponses`: responses that can be asked for later, gone on from, or read again while they are written.

A kept response is its last JSON, and the conversation with its answer. One in the background also has its events, numbered, for
readers that come and go. All of it is bounded. Responses that have ended have a number of bytes together, and the oldest goes
first. The number of responses in the background is limited, and the bytes of the events of each. Events go some time after the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import orjson

from actorllm.clock import now
from actorllm.server.envelope import ApiError

MAX_BYTES = 64 << 20
"""Of responses that have ended, with their conversations and events."""
MAX_KEPT = 4096
MAX_CONVERSATION_BYTES = 1 << 20
"""A longer conversation is not kept: it is read on the loop of the server when a request goes on from it."""
MAX_BACKGROUND = 64
"""Responses that are written in the background at a time."""
MAX_EVENT_BYTES = 1 << 20
"""Of one response; then the oldest events go."""
EVENTS_KEPT_S = 600.0
"""After the end of a response, in seconds."""


class KeptResponse:
    """One of them."""

    def __init__(self, name: str, messages: list[dict[str, Any]] | None, response: bytes, is_background: bool) -> None:
        """messages: the conversation before the answer, without instructions; None: it is too long to be kept.

        response: as it is now, as JSON.
        """
        self.id = name
        self.response = response
        self.is_background = is_background
        self.is_cancelled = False
        self.abort: Callable[[], None] = _nothing
        """Ends what the engine does for it."""
        self.ended_at: float | None = None
        self.conversation = b"" if messages is None else orjson.dumps(messages)
        """As JSON; empty where it is not kept."""
        self.input_items = b""
        """What the request gave as input, as a list of items in JSON; empty where it is not kept."""
        self._events: deque[bytes] = deque()
        self._num_dropped = 0
        self._num_event_bytes = 0
        self._news = anyio.Event()

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.conversation) + len(self.input_items) + self._num_event_bytes

    def answer(self, messages: list[dict[str, Any]]) -> None:
        """Put what was answered behind the conversation."""
        if self.conversation and messages:
            begun = self.conversation[:-1] + b"," if len(self.conversation) > 2 else b"["
            self.conversation = begun + orjson.dumps(messages)[1:]
        if len(self.conversation) > MAX_CONVERSATION_BYTES:
            self.conversation = b""

    def add(self, chunk: bytes) -> None:
        """More events, as they go to a client."""
        for block in chunk.split(b"\n\n")[:-1]:
            number = self._num_dropped + len(self._events)
            event = b"id: %d\n%b\n\n" % (number, block)
            self._events.append(event)
            self._num_event_bytes += len(event)
        while self._num_event_bytes > MAX_EVENT_BYTES and len(self._events) > 1:
            self._num_event_bytes -= len(self._events.popleft())
            self._num_dropped += 1
        self._tell()

    def end(self) -> None:
        """Nothing more is to come."""
        if self.ended_at is None:
            self.ended_at = now()
            self._tell()

    def forget_events(self) -> None:
        self._num_dropped += len(self._events)
        self._events.clear()
        self._num_event_bytes = 0

    def after(self, number: int) -> tuple[bytes, int]:
        """The events behind that number, and the number of the last one. Raises ApiError if they are no longer there."""
        first = number + 1 - self._num_dropped
        if first < 0:
            told = f"events up to {self._num_dropped - 1} are no longer kept; ask for the response without stream"
            raise ApiError(400, told, "starting_after")
        last = self._num_dropped + len(self._events) - 1
        return b"".join(self._events[i] for i in range(first, len(self._events))), max(number, last)

    async def wait_behind(self, number: int) -> None:
        """Until there are events behind that number, or no more to come."""
        while self.ended_at is None and self._num_dropped + len(self._events) <= number + 1:
            await self._news.wait()

    async def wait_for_end(self) -> None:
        while self.ended_at is None:
            await self._news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()


def _nothing() -> None:
    """Of a response that is not in the background."""


class KeptResponses:
    """Those of one application."""

    def __init__(self) -> None:
        self._open: dict[str, KeptResponse] = {}
        """In the background, and not ended."""
        self._ended: dict[str, KeptResponse] = {}
        """The oldest end first."""
        self._with_events: deque[KeptResponse] = deque()
        """Those of them that were written in the background, in the same order."""
        self._num_bytes = 0
        """Of those that have ended."""

    def begin(self, kept: KeptResponse) -> None:
        """It is written in the background from now on. Raises ApiError where there are too many, or one of this name."""
        if len(self._open) >= MAX_BACKGROUND:
            told = f"{len(self._open)} responses are written in the background, which is the limit; try again later"
            raise ApiError(429, told, "background")
        self._check_name(kept.id)
        self._open[kept.id] = kept

    def add(self, kept: KeptResponse) -> None:
        """It has ended. The oldest make room for it; one that is larger than all of them may be is not kept."""
        kept.end()
        if kept.is_background and self._open.pop(kept.id, None) is not kept:
            return  # its client has had it forgotten
        if self._ended.get(kept.id) is not None:
            self.forget(self._ended[kept.id])
        self._ended[kept.id] = kept
        self._num_bytes += kept.num_bytes
        if kept.is_background:
            self._with_events.append(kept)
        self._clean()

    def find(self, name: str, field: str = "response_id") -> KeptResponse:
        """field: where the client has named it. Raises ApiError if there is none of this name."""
        self._clean()
        kept = self._open.get(name) or self._ended.get(name)
        if kept is None:
            told = f"{field}: there is no response {name!r:.80}; it was not stored, or has made room for newer ones"
            raise ApiError(404, told, field)
        return kept

    def forget(self, kept: KeptResponse) -> None:
        self._open.pop(kept.id, None)
        if self._ended.pop(kept.id, None) is not None:
            self._num_bytes -= kept.num_bytes

    def _check_name(self, name: str) -> None:
        if name in self._open or name in self._ended:
            raise ApiError(400, f"request_id: there is a response {name!r:.80} already", "request_id")

    def _clean(self) -> None:
        until = now() - EVENTS_KEPT_S
        while self._with_events and (self._with_events[0].ended_at or 0.0) < until:
            kept = self._with_events.popleft()
            before = kept.num_bytes
            kept.forget_events()
            if self._ended.get(kept.id) is kept:
                self._num_bytes += kept.num_bytes - before
        while self._num_bytes > MAX_BYTES or len(self._ended) > MAX_KEPT:
            self.forget(next(iter(self._ended.values())))
