"""`KeptResponses`: responses that can be asked for later, gone on from, or read again while they are written.

A kept response is its last JSON, and the conversation with its answer. One that outlives its readers also has its events
(`outliving`). All of it is bounded. Responses that have ended have a number of bytes together, and the oldest goes first. The
number of those that outlive their readers is limited, and the bytes of the events of each. Events go some time after the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from actorllm.clock import now
from actorllm.server.envelope import ApiError
from actorllm.server.outliving.record import EventRecord

MAX_BYTES = 64 << 20
"""Of responses that have ended, with their conversations and events."""
MAX_KEPT = 4096
MAX_CONVERSATION_BYTES = 1 << 20
"""A longer conversation is not kept: it is read on the loop of the server when a request goes on from it."""
MAX_BACKGROUND = 64
"""Responses that are written in the background at a time."""
MAX_RESUMABLE = 256
"""Streams of clients that outlive their readers, at a time."""
MAX_EVENT_BYTES = 1 << 20
"""Of one response in the background; then the oldest events go."""
MAX_RESUMABLE_BYTES = 1 << 18
"""The same of another stream that outlives its readers."""
EVENTS_KEPT_S = 600.0
"""After the end of a response in the background, in seconds."""


class KeptResponse(EventRecord):
    """One of them. Its events are those of a response that outlives its readers."""

    def __init__(
        self,
        name: str,
        messages: list[dict[str, Any]] | None,
        response: bytes,
        is_background: bool,
        resume_for: float | None = None,
        is_stored: bool = True,
    ) -> None:
        """messages: the conversation before the answer, without instructions; None: it is too long to be kept.

        response: as it is now, as JSON. resume_for: of another stream that outlives its readers: seconds without one until it is
        aborted, and from its end until it is forgotten. is_stored: it may be asked for by its name, not only read on.
        """
        super().__init__(MAX_EVENT_BYTES if is_background else MAX_RESUMABLE_BYTES)
        self.id = name
        self.response = response
        self.is_background = is_background
        self.is_cancelled = False
        self.resume_for = None if is_background else resume_for
        self.is_stored = is_stored
        self.abort: Callable[[], None] = _nothing
        """Ends what the engine does for it."""
        self.conversation = b"" if messages is None else orjson.dumps(messages)
        """As JSON; empty where it is not kept."""
        self.input_items = b""
        """What the request gave as input, as a list of items in JSON; empty where it is not kept."""

    @property
    def outlives(self) -> bool:
        """Whether it goes on without readers, and has events."""
        return self.is_background or self.resume_for is not None

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.conversation) + len(self.input_items) + self._num_event_bytes

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    def end(self) -> None:
        super().end()
        self.abort = _nothing  # which held what the engine was asked: that is not among the bytes that are counted

    def answer(self, messages: list[dict[str, Any]]) -> None:
        """Put what was answered behind the conversation."""
        if self.conversation and messages:
            begun = self.conversation[:-1] + b"," if len(self.conversation) > 2 else b"["
            self.conversation = begun + orjson.dumps(messages)[1:]
        if len(self.conversation) > MAX_CONVERSATION_BYTES:
            self.conversation = b""

    # The same of a response that another process keeps (`outliving.elsewhere`) asks that process.

    async def part(self, part: str) -> bytes:
        """response, conversation or input_items."""
        data: bytes = getattr(self, part)
        return data

    async def check_after(self, number: int) -> None:
        """Raises ApiError if the events behind that number are no longer there."""
        self.after(number)

    async def cancel(self) -> None:
        """End it, and wait for the end."""
        if self.ended_at is None:
            self.is_cancelled = True
            self.abort()
            await self.wait_for_end()


def _nothing() -> None:
    """Of a response that is not in the background."""


class KeptResponses:
    """Those of one application."""

    def __init__(self) -> None:
        self._open: dict[str, KeptResponse] = {}
        """Those that outlive their readers, and have not ended."""
        self._ended: dict[str, KeptResponse] = {}
        """The oldest end first."""
        self._with_events: dict[str, KeptResponse] = {}
        """Those of them that have events."""
        self._next_expiry = math.inf
        """When there are events to be forgotten, or earlier."""
        self._num_bytes = 0
        """Of those that have ended."""

    def has_room(self, *, is_background: bool) -> bool:
        """For one more that outlives its readers."""
        number = sum(1 for kept in self._open.values() if kept.is_background is is_background)
        return number < (MAX_BACKGROUND if is_background else MAX_RESUMABLE)

    def begin(self, kept: KeptResponse) -> None:
        """It outlives its readers from now on. Raises ApiError where there are too many, or one of this name."""
        if not self.has_room(is_background=kept.is_background):
            what, field = ("responses are written in the background", "background")
            if not kept.is_background:
                what, field = ("streams outlive their readers", "resume_for")
            told = (
                f"{MAX_BACKGROUND if kept.is_background else MAX_RESUMABLE} {what}, which is the limit; try again later"
            )
            raise ApiError(429, told, field)
        self._check_name(kept.id)
        self._open[kept.id] = kept

    def add(self, kept: KeptResponse) -> None:
        """It has ended. The oldest make room for it; one that is larger than all of them may be is not kept."""
        kept.end()
        if kept.outlives and self._open.pop(kept.id, None) is not kept:
            return  # its client has had it forgotten
        if self._ended.get(kept.id) is not None:
            self.forget(self._ended[kept.id])
        self._ended[kept.id] = kept
        self._num_bytes += kept.num_bytes
        if kept.outlives:
            self._with_events[kept.id] = kept
            self._next_expiry = min(self._next_expiry, _expiry(kept))
        self._clean()

    def drop(self, kept: KeptResponse) -> None:
        """It has ended, and nothing of it is kept."""
        kept.end()
        self._open.pop(kept.id, None)

    def get(self, name: str, *, is_read: bool = False) -> KeptResponse | None:
        """is_read: as a stream. None: there is none of this name that may be asked for so."""
        self._clean()
        kept = self._open.get(name) or self._ended.get(name)
        return kept if kept is not None and (kept.is_stored or is_read) else None

    def find(self, name: str, field: str = "response_id", *, is_read: bool = False) -> KeptResponse:
        """field: where the client has named it. Raises ApiError if there is none of this name."""
        kept = self.get(name, is_read=is_read)
        if kept is None:
            told = f"{field}: there is no response {name!r:.80}; it was not stored, or has made room for newer ones"
            raise ApiError(404, told, field)
        return kept

    def forget(self, kept: KeptResponse) -> None:
        self._open.pop(kept.id, None)
        self._with_events.pop(kept.id, None)
        if self._ended.pop(kept.id, None) is not None:
            self._num_bytes -= kept.num_bytes

    def forget_asked(self, kept: KeptResponse) -> None:
        """Its client wants it to be forgotten; what is written of it ends."""
        if kept.ended_at is None:
            kept.abort()
        self.forget(kept)

    def may_begin(self, kept: KeptResponse) -> bool:
        """Whether `begin` takes it."""
        return self.has_room(is_background=kept.is_background) and not self._is_taken(kept.id)

    def _is_taken(self, name: str) -> bool:
        return name in self._open or name in self._ended

    def _check_name(self, name: str) -> None:
        if self._is_taken(name):
            raise ApiError(400, f"request_id: there is a response {name!r:.80} already", "request_id")

    def _clean(self) -> None:
        if self._next_expiry <= (at := now()):
            for kept in [kept for kept in self._with_events.values() if _expiry(kept) <= at]:
                self._forget_events(kept)
            self._next_expiry = min(map(_expiry, self._with_events.values()), default=math.inf)
        while self._num_bytes > MAX_BYTES or len(self._ended) > MAX_KEPT:
            self.forget(next(iter(self._ended.values())))

    def _forget_events(self, kept: KeptResponse) -> None:
        if not kept.is_stored:
            self.forget(kept)
            return
        del self._with_events[kept.id]
        before = kept.num_bytes
        kept.forget_events()
        self._num_bytes += kept.num_bytes - before


def _expiry(kept: KeptResponse) -> float:
    """When the events of a response that has ended are forgotten."""
    assert kept.ended_at is not None
    return kept.ended_at + (EVENTS_KEPT_S if kept.resume_for is None else kept.resume_for)
