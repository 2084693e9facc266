"""A server process of its own: uvicorn around the application, and an orderly end.

On SIGTERM or SIGINT nothing new is taken (503 with Retry-After, `/health` included, so that load balancers turn away), what
is under way is finished or, after the drain timeout, answered with what there is; then the listeners close. A second signal
ends it at once. Called by `actorllm serve`; owns neither engine nor application.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import uvicorn
from fastapi import FastAPI

from actorllm.errors import ConfigError
from actorllm.server.state import ServerState

logger = logging.getLogger(__name__)

HEADERS_TIMEOUT_S = 30.0
GRACE_S = 5
"""For responses to reach their clients, after the engine has ended them."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a server listens and how; uvicorn's options."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    log_level: str = "info"
    access_log: bool = True
    drain_timeout_s: float = 30.0

    def config(self, app: FastAPI) -> uvicorn.Config:
        tls: dict[str, Any] = {}
        if self.ssl_certfile is not None:
            tls = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
            tls |= {"ssl_ca_certs": self.ssl_ca_certs, "ssl_cert_reqs": self.ssl_cert_reqs}
        elif self.ssl_keyfile is not None or self.ssl_ca_certs is not None:
            raise ConfigError("TLS needs ssl_certfile, too")
        config = uvicorn.Config(
            app,
            host=self.host,
            port=self.port,
            uds=self.unix_socket,
            log_level=self.log_level,
            access_log=self.access_log,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
            **tls,
        )
        try:
            config.load()
        except OSError as error:  # files that are not there, or hold none of it; it does not say which
            files = f"ssl_certfile={self.ssl_certfile!r}, ssl_keyfile={self.ssl_keyfile!r}"
            raise ConfigError(f"{files}: TLS cannot be set up with these: {error.strerror or error}") from error
        _close_silent_connections(config)
        return config


class _Server(uvicorn.Server):
    """uvicorn's, without signal handlers: `serve` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: FastAPI, listener: Listener) -> None:
    """Listen until a signal comes and everything is answered. Raises ConfigError when it cannot listen there."""
    state: ServerState = app.state.server
    server = _Server(listener.config(app))
    async with anyio.create_task_group() as group:
        group.start_soon(_end_on_signal, state, server, listener.drain_timeout_s)
        try:
            await server.serve()
        except SystemExit:  # uvicorn's way to say that it could not listen, after it has logged why
            raise ConfigError(f"cannot listen on {_place(listener)}; the reason is in the log above") from None
        finally:
            group.cancel_scope.cancel()


async def _end_on_signal(state: ServerState, server: uvicorn.Server, drain_timeout_s: float) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as group:
            async for _ in signals:
                if state.is_draining:
                    server.force_exit = server.should_exit = True
                    group.cancel_scope.cancel()
                    return
                state.is_draining = True
                logger.info("%d requests are finished before the end", state.num_in_flight)
                group.start_soon(_drain, state, server, drain_timeout_s)


async def _drain(state: ServerState, server: uvicorn.Server, timeout_s: float) -> None:
    if not await state.llm.drain(timeout_s):
        logger.warning("requests that took longer than %g s were ended", timeout_s)
    server.should_exit = True


def _place(listener: Listener) -> str:
    return listener.unix_socket or f"{listener.host}:{listener.port}"


def _close_silent_connections(config: uvicorn.Config) -> None:
    """Close connections on which a request begins and does not go on: uvicorn only looks at those that begin none."""
    base: Any = config.http_protocol_class
    if not hasattr(base, "on_headers_complete"):  # h11 has no such moment
        return

    class Protocol(base):  # type: ignore[misc]
        """The headers of a request must be here within HEADERS_TIMEOUT_S; `Guards` sees to its body."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.headers_timer = self.loop.call_later(HEADERS_TIMEOUT_S, transport.close)

        def on_message_begin(self) -> None:
            self.headers_timer.cancel()
            self.headers_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.headers_timer.cancel()
            super().on_headers_complete()

        def connection_lost(self, error: Exception | None) -> None:
            self.headers_timer.cancel()
            super().connection_lost(error)

    config.http_protocol_class = Protocol
