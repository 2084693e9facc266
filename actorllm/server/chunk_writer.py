"""`ChunkWriter`: writes the middle of a streamed response from a callback of the loop, without a task and without ASGI messages.

A token becomes one chunk of some hundred bytes. Through ASGI, it wakes a task, which awaits the `send` of each layer. A callback
writes the same bytes at half of that cost. The beginning and the end of a response, and every write that has to wait for
the client, go through ASGI.

`direct` puts a writer into the scope of each request. `launcher.config_of` uses it if no layer changes bodies (`keeps_bodies`).
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from actorllm.server.guards import Guards

WRITER = "actorllm.writer"
"""Where in the scope the writer of a request is. It is absent under other servers."""


class ChunkWriter:
    """Of one request. cycle: uvicorn's state of the request and its response."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether a chunk may be written now: the response has begun, is chunked, and the client reads fast enough."""
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, body: bytes) -> None:
        """Write a chunk, which must not be empty: an empty one ends a response. Only while `is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def direct(base: Any) -> Any:
    """uvicorn's protocol class for httptools, or one derived from it, with a writer in the scope of each request."""

    class DirectConnection(base):  # type: ignore[misc]
        def on_headers_complete(self) -> None:
            super().on_headers_complete()  # the task of the request starts with the next turn of the loop
            if self.cycle is not None and self.cycle.scope is self.scope and self.scope["method"] != "HEAD":
                self.scope[WRITER] = ChunkWriter(self.cycle)

    return DirectConnection


def keeps_bodies(app: Any) -> bool:
    """Whether no middleware stands between an application of this package and the connection but its own, which keep bodies."""
    own: tuple[object, ...] = (Guards, CORSMiddleware)
    return isinstance(app, Starlette) and all(layer.cls in own for layer in app.user_middleware)
