"""`ConnectionLimit`: how many connections an API process keeps open, and which of them are closed early.

Each connection holds a descriptor, and a process that has none left can accept no other. At the limit, a new connection
replaces the one that has been idle longest. A connection is idle while no request is under way on it. That is before the
headers of its first request are complete, and between an answer and the next request. If all are busy, the new connection gets
a 503 and is closed.

A connection whose request begins and does not go on is closed after `HEADERS_TIMEOUT_S`; uvicorn closes only those on which none
has begun. `Guards` limits how long a body may take. Called by `launcher.config_of`; used on the loop of the server alone.
"""

from __future__ import annotations

import resource
from typing import Any

from actorllm.errors import ConfigError

HEADERS_TIMEOUT_S = 30.0
DEFAULT_MAX_CONNECTIONS = 8192
RESERVED_DESCRIPTORS = 256
"""Of those that the process may open, for the engine: rings, doorbells, files, attached programs."""
LEAST_CONNECTIONS = 16

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"content-type: application/json\r\n"
    b"content-length: %d\r\n"
    b"retry-after: 1\r\n"
    b"connection: close\r\n\r\n%b"
)
FULL_BODY = (
    b'{"error":{"message":"the server has as many connections as it may, all of them busy: try again later, or raise '
    b'--max-connections","type":"ServiceUnavailableError","param":null,"code":503}}'
)


def max_connections(asked: int | None) -> int:
    """The limit of a process: what was asked for, or what its descriptors allow.

    Raises ConfigError if the limit on open files (`ulimit -n`) is too low for the number that was asked for.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = DEFAULT_MAX_CONNECTIONS if files == resource.RLIM_INFINITY else files - RESERVED_DESCRIPTORS
    if asked is None:
        return max(LEAST_CONNECTIONS, min(DEFAULT_MAX_CONNECTIONS, room))
    if asked < 1:
        raise ConfigError(f"max_connections={asked!r} must be at least 1")
    if files != resource.RLIM_INFINITY and asked > max(LEAST_CONNECTIONS, room):
        raise ConfigError(
            f"max_connections={asked!r} needs {asked + RESERVED_DESCRIPTORS} open files, and this process may have {files}: "
            f"raise `ulimit -n`, or ask for at most {max(LEAST_CONNECTIONS, room)}"
        )
    return asked


class ConnectionLimit:
    """The connections of a process. limit: how many may be open."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[Any] = set()
        self._idle: dict[Any, None] = {}
        """Protocols without a request under way, the longest idle first."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Any) -> bool:
        """Count a new connection, which is idle. False: there is no room, and none is idle."""
        if len(self._open) >= self.limit and not self._close_idle():
            return False
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def set_busy(self, connection: Any) -> None:
        self._idle.pop(connection, None)

    def set_idle(self, connection: Any) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Any) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _close_idle(self) -> bool:
        if not self._idle:
            return False
        oldest = next(iter(self._idle))
        self.remove(oldest)
        oldest.transport.abort()
        return True


def limited(base: Any, limit: int) -> Any:
    """uvicorn's protocol class for httptools, or one derived from it, under a `ConnectionLimit` of its own."""
    connections = ConnectionLimit(limit)

    class LimitedConnection(base):  # type: ignore[misc]
        """The headers of a request must be here within HEADERS_TIMEOUT_S."""

        headers_timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if connections.add(self):
                self._expect_headers()
            else:
                transport.write(FULL % (len(FULL_BODY), FULL_BODY))
                transport.close()

        def on_message_begin(self) -> None:
            self._expect_headers()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.headers_timer.cancel()
            connections.set_busy(self)
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # otherwise the next of the pipelined requests is under way
                connections.set_idle(self)

        def connection_lost(self, error: Exception | None) -> None:
            if self.headers_timer is not None:
                self.headers_timer.cancel()
            connections.remove(self)
            super().connection_lost(error)

        def _expect_headers(self) -> None:
            if self.headers_timer is not None:
                self.headers_timer.cancel()
            self.headers_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)

    return LimitedConnection
