"""A server process: uvicorn around the application, and an orderly end.

On SIGTERM or SIGINT nothing new is taken (503 with Retry-After, `/health` included, so that load balancers turn away), what
is under way is finished or, after the drain timeout, answered with what there is; then the listeners close. A second signal
ends it at once. Called by `actorllm serve`; owns neither engine nor application. Of several API processes each has the
`Server` of here, and `processes` has the signals.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import socket
import stat
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import uvicorn
import uvicorn.config
from fastapi import FastAPI

from actorllm.async_llm import AsyncLLM
from actorllm.errors import ConfigError, EngineError
from actorllm.server.state import ServerState

logger = logging.getLogger(__name__)

HEADERS_TIMEOUT_S = 30.0
GRACE_S = 5
"""For responses to reach their clients, after the engine has ended them."""
BACKLOG = 2048
SOCKET_MODE = 0o666
"""Of a unix socket: who may enter its folder may connect."""


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

    def config(self, app: Any) -> uvicorn.Config:
        """Raises ConfigError when TLS cannot be set up."""
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
            backlog=BACKLOG,
            log_config=log_config(),
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

    def bind(self) -> socket.socket:
        """The socket to listen on. Raises ConfigError, also where another server listens at the path of a unix socket."""
        is_unix = self.unix_socket is not None
        family = socket.AF_UNIX if is_unix else socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.socket(family)
        try:
            if self.unix_socket is not None:
                _remove_stale(self.unix_socket)
                bound.bind(self.unix_socket)
                os.chmod(self.unix_socket, SOCKET_MODE)
            else:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            bound.close()
            raise ConfigError(f"cannot listen on {self.place()}: {error}") from None
        return bound

    def unbind(self) -> None:
        """Of a unix socket the path, too, ends with its server."""
        if self.unix_socket is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.unix_socket)

    def place(self, bound: socket.socket | None = None) -> str:
        """Where it is, in words; bound: with the port that was found."""
        if self.unix_socket is not None:
            return f"unix socket {self.unix_socket}"
        port = self.port if bound is None else bound.getsockname()[1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.ssl_certfile is None else 'https'}://{host}:{port}"


def _remove_stale(path: str) -> None:
    """A unix socket that nobody listens on any more."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def log_config() -> dict[str, Any]:
    """uvicorn's, with this library's loggers beside its own, and the ids of requests before what is about them."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["filters"] = {"request_id": {"()": "actorllm.server.request_log.RequestIdFilter"}}
    for handler in config["handlers"].values():
        handler["filters"] = ["request_id"]
    for formatter in config["formatters"].values():
        formatter["fmt"] = formatter["fmt"].replace("%(levelprefix)s ", "%(levelprefix)s %(request)s")
    config["loggers"]["actorllm"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config


class Server(uvicorn.Server):
    """uvicorn's, without signal handlers: `serve` has its own. on_started: to be called once it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], object] = bool) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def end(self, is_forced: bool = False) -> None:
        self.force_exit |= is_forced
        self.should_exit = True


async def serve(app: FastAPI, listener: Listener) -> None:
    """Listen until a signal comes and everything is answered. Raises ConfigError when it cannot listen there."""
    state: ServerState = app.state.server
    config = listener.config(app)
    if listener.unix_socket is None:
        await _serve(state, Server(config), listener, None)
        return
    bound = listener.bind()  # uvicorn would take the path from a server that listens there, and leave its own behind
    try:
        server = Server(config, partial(logger.info, "running on %s", listener.place()))
        await _serve(state, server, listener, [bound])
    finally:
        bound.close()
        listener.unbind()


async def _serve(state: ServerState, server: Server, listener: Listener, sockets: list[socket.socket] | None) -> None:
    async def drain_and_end() -> None:
        await drain(state, server, listener.drain_timeout_s)

    async with anyio.create_task_group() as group:
        group.start_soon(end_on_signal, drain_and_end, partial(server.end, True))
        group.start_soon(state.watch_lag)
        try:
            await server.serve(sockets)
        except SystemExit:  # uvicorn's way to say that it could not listen, after it has logged why
            raise ConfigError(f"cannot listen on {listener.place()}; the reason is in the log above") from None
        finally:
            group.cancel_scope.cancel()


def innermost(error: BaseException) -> BaseException:
    """What the first task of a group has raised, through all groups around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def end_on_signal(drain: Callable[[], Coroutine[Any, Any, None]], force: Callable[[], object]) -> None:
    """The first signal begins an orderly end, the second one makes an end."""
    is_draining = False
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as group:
            async for _ in signals:
                if is_draining:
                    force()
                    group.cancel_scope.cancel()
                    return
                is_draining = True
                group.start_soon(drain)


async def drain(state: ServerState, server: Server, timeout_s: float) -> None:
    """Take nothing more, finish what is under way, and end the server."""
    state.is_draining = True
    logger.info("%d requests are finished before the end", state.num_in_flight)
    await drain_engine(state.llm, timeout_s)
    server.end()


async def drain_engine(llm: AsyncLLM, timeout_s: float) -> None:
    """Let its requests finish. An engine that has died has none."""
    try:
        if not await llm.drain(timeout_s):
            logger.warning("requests that took longer than %g s were ended", timeout_s)
    except EngineError as error:
        logger.warning("there is nothing to finish: %s", error)


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
