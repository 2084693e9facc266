"""A server process: uvicorn around the application, and an orderly end.

On SIGTERM or SIGINT nothing new is taken: 503 with Retry-After, `/health` included, so that load balancers turn away. What is
under way is finished or, after the drain timeout, answered with what there is. Then the listeners close. A second signal ends it
at once, and one that comes while the engine starts ends the start. Called by `actorllm serve`. Of several API processes each has
the `Server` of here, and `processes` has the signals.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import anyio
import uvicorn
import uvicorn.config
from anyio import to_thread
from anyio.abc import TaskStatus
from fastapi import FastAPI

from actorllm.api.async_llm import AsyncLLM
from actorllm.errors import EngineError
from actorllm.server.chunk_writer import direct, keeps_bodies
from actorllm.server.connections import limited, max_connections
from actorllm.server.header_bytes import bounded
from actorllm.server.listener import BACKLOG, Listener
from actorllm.server.state import ServerState
from actorllm.server.warmup import warm_up

logger = logging.getLogger(__name__)

GRACE_S = 5
"""For responses to reach their clients, after the engine has ended them."""


def config_of(listener: Listener, app: Any) -> uvicorn.Config:
    """What uvicorn is told; logging is configured with it. Raises ConfigError when TLS cannot be set up."""
    config = uvicorn.Config(
        app,
        host=listener.host,
        port=listener.port,
        uds=listener.unix_socket,
        backlog=BACKLOG,
        log_config=log_config(),
        log_level=listener.log_level,
        access_log=listener.access_log,
        lifespan="off",
        ws="none",  # a connection that changed its protocol would leave the limit of connections
        timeout_graceful_shutdown=GRACE_S,
        **listener.tls(),
    )
    config.load()
    base = config.http_protocol_class
    if hasattr(base, "on_headers_complete"):  # h11's has no such moment
        if keeps_bodies(app):
            base = direct(base)
        config.http_protocol_class = bounded(limited(base, max_connections(listener.max_connections)))
    return config


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
    """uvicorn's, without signal handlers: `serve` has its own.

    on_started: to be called once it listens. on_ending: before its sockets are closed.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], object] = bool,
        on_ending: Callable[[], object] = bool,
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._on_ending = on_ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            if self.started and not self.should_exit:  # cancelled: the loop may listen on copies of the sockets
                self.end(is_forced=True)
                with anyio.CancelScope(shield=True):
                    await self.shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_ending()
        await super().shutdown(sockets)

    def end(self, is_forced: bool = False) -> None:
        self.force_exit |= is_forced
        self.should_exit = True


async def serve(app: FastAPI, listener: Listener) -> None:
    """Start the engine, serve until a signal comes and everything is answered, and end the engine.

    Raises ConfigError when it cannot listen there, before the engine starts, and what kept the engine from starting.
    """
    state: ServerState = app.state.server
    config = config_of(listener, app)
    bound = listener.bind()
    starting = anyio.CancelScope()

    def tell_ready() -> None:
        logger.info("running on %s", listener.place(bound))

    server = Server(config, tell_ready, bound.unlink)

    async def end() -> None:
        if server.started:
            await drain(state, server, listener.drain_timeout_s)
        else:
            starting.cancel()
            server.end()

    try:
        async with anyio.create_task_group() as group:
            await group.start(end_on_signal, end, partial(server.end, True))
            try:
                with starting:
                    logger.info("the engine starts; then the server listens on %s", listener.place(bound))
                    await warm_up(app)
                    gc.collect()
                    gc.freeze()  # what start-up made, which takes half a second to be looked through, lives as long as this
                    bound.listen()
                if not starting.cancel_called:
                    group.start_soon(state.watch_lag)
                    await server.serve(bound.sockets)
            finally:
                group.cancel_scope.cancel()
    finally:
        gc.unfreeze()
        bound.close()
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(state.llm.shutdown)


async def end_on_signal(
    drain: Callable[[], Coroutine[Any, Any, None]],
    force: Callable[[], object],
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """The first signal begins an orderly end, the second one makes an end. Started once signals are received.

    In another thread than the main one, as that of an actor of Ray, there are no signals: the caller cancels.
    """
    if threading.current_thread() is not threading.main_thread():
        task_status.started()
        return
    is_draining = False
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
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
