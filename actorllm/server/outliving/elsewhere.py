"""What another API process keeps, read through the owner of both: `KeptElsewhere` asks, `answer_peer` answers.

A piece of it goes into one frame of the control line (`line`), so a long text takes several questions. A question for events
waits a moment if there are none. Bytes travel as base64. A process that has ended takes what it kept with it, which is an ApiError.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import anyio

from actorllm.server.envelope import ApiError
from actorllm.server.responses.kept import KeptResponse, KeptResponses

MAX_PIECE = 48 << 10
"""Bytes per question."""
POLL_S = 1.0
"""How long a question for events waits."""
PARTS = ("response", "conversation", "input_items")


class Asking(Protocol):
    """The other processes."""

    async def kept(self, **arguments: Any) -> Mapping[str, Any] | None:
        """What `answer_peer` says there; None: it keeps none of this name, or has ended."""


async def answer_peer(responses: KeptResponses, **arguments: Any) -> dict[str, Any] | None:
    """What this process says to another of what it keeps. None: there is none of this name."""
    kept = responses.get(arguments["name"], is_read=arguments["is_read"])
    if kept is None:
        return None
    try:
        match arguments["what"]:
            case "events":
                return await _events(kept, arguments["after"], arguments["offset"])
            case "after":
                await kept.check_after(arguments["after"])
            case "cancel":
                await kept.cancel()
            case "forget":
                responses.forget_asked(kept)
            case part if part in PARTS:
                return _piece(getattr(kept, part), arguments["offset"])
    except ApiError as error:
        return {"refused": [error.status, error.message, error.param]}
    return {"is_background": kept.is_background, "outlives": kept.outlives, "has_ended": kept.ended_at is not None}


async def _events(kept: KeptResponse, after: int, offset: int) -> dict[str, Any]:
    """offset: how much of the events behind that number is known there."""
    with kept.being_read(), anyio.move_on_after(POLL_S):
        await kept.wait_behind(after)
    is_over = kept.ended_at is not None
    chunk, last = kept.after(after)
    told = _piece(chunk, offset)
    is_all = offset + MAX_PIECE >= len(chunk)
    return {**told, "last": last if is_all else None, "is_over": is_over and is_all}


def _piece(data: bytes, offset: int) -> dict[str, Any]:
    return {"data": base64.b64encode(data[offset : offset + MAX_PIECE]).decode(), "size": len(data)}


class KeptElsewhere:
    """As a `KeptResponse`, of another process."""

    def __init__(self, peers: Asking, name: str, is_read: bool, told: Mapping[str, Any]) -> None:
        self.id = name
        self._peers = peers
        self._is_read = is_read
        self._offset = 0
        self._begun = b""
        """Of an event whose rest is to be asked for: a reader gets it whole, or another one in its place."""
        self.is_background: bool = told["is_background"]
        self.outlives: bool = told["outlives"]
        self.has_ended: bool = told["has_ended"]

    @classmethod
    async def find(cls, peers: Asking, name: str, *, is_read: bool = False) -> KeptElsewhere | None:
        """is_read: as a stream."""
        told = await peers.kept(name=name, is_read=is_read, what="about")
        return None if told is None else cls(peers, name, is_read, told)

    async def _ask(self, what: str, **arguments: Any) -> Mapping[str, Any]:
        told = await self._peers.kept(name=self.id, is_read=self._is_read, what=what, **arguments)
        if told is None:
            raise ApiError(404, f"response_id: {self.id!r:.80} is no longer kept; its process has ended", "response_id")
        if "refused" in told:
            status, message, param = told["refused"]
            raise ApiError(status, message, param)
        return told

    async def part(self, part: str) -> bytes:
        """One of `PARTS`, whole."""
        data, size = b"", -1
        while len(data) != size:
            told = await self._ask(part, offset=len(data))
            if size not in (-1, told["size"]):  # a response is another text once it has ended
                data, size = b"", told["size"]
                continue
            data, size = data + base64.b64decode(told["data"]), told["size"]
        return data

    async def cancel(self) -> None:
        await self._ask("cancel")

    async def forget(self) -> None:
        await self._ask("forget")

    async def check_after(self, number: int) -> None:
        await self._ask("after", after=number)

    def being_read(self) -> contextlib.AbstractContextManager[None]:
        """The process that has it counts the questions."""
        return contextlib.nullcontext()

    async def read_behind(self, number: int) -> tuple[bytes, int, bool]:
        told = await self._ask("events", after=number, offset=self._offset)
        piece = base64.b64decode(told["data"])
        data = self._begun + piece
        if told["last"] is None:
            self._offset += len(piece)
            end = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
            self._begun = data[end:]
            return data[:end], number, False
        self._offset, self._begun = 0, b""
        return data, told["last"], told["is_over"]
