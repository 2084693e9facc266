"""One of several API processes of a server: it joins the engine of the process that started it, and serves.

Started by `processes` with one end of a `ControlLine`. Over it the process is asked to serve, with the listening socket and the
board as descriptors, and to drain. It asks there what only the owner knows. Invariants: it never outlives the owner. Signals for
all processes of a terminal or a service are the owner's to act upon. It dies alone, and with it only its own connections.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from actorllm.actors.child import FOR_THE_OWNER, OWNER_GONE, die_with_owner, name_process
from actorllm.api.async_llm import AsyncLLM
from actorllm.errors import ActorLLMError, EngineError
from actorllm.server.app import create_app
from actorllm.server.board import Board
from actorllm.server.launcher import Server, config_of, drain
from actorllm.server.line import ControlLine
from actorllm.server.listener import Bound, Listener
from actorllm.server.outliving.elsewhere import answer_peer
from actorllm.server.state import Peers, ServerState
from actorllm.server.warmup import warm_up

ASK_TIMEOUT_S = 5.0
MAX_NAMES_BYTES = 1 << 15
"""Of the ids that are asked for at a time: a frame has room for no more."""


def main() -> None:
    """argv: the descriptor of the line, the owner's pid."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_owner(int(sys.argv[2]))
    for number in FOR_THE_OWNER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_OWNER)
    name_process("actorllm:api")
    anyio.run(ApiProgram(control).run, backend_options={"use_uvloop": True})


class ApiProgram:
    def __init__(self, control: socket.socket) -> None:
        self._line = ControlLine(control, self._answer)
        self._tasks: TaskGroup
        self._state: ServerState | None = None
        self._server: Server | None = None
        self._drain_timeout_s = 0.0

    async def run(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._listen)

    async def _listen(self) -> None:
        await self._line.run()
        os._exit(OWNER_GONE)

    async def _answer(self, verb: str, arguments: dict[str, Any], fds: tuple[int, ...]) -> Any:
        match verb:
            case "serve":
                return await self._begin(fds, **arguments)
            case "drain":
                if self._server is None or self._state is None:
                    os._exit(0)
                self._tasks.start_soon(drain, self._state, self._server, self._drain_timeout_s)
                return True
            case "abort":
                return self._state.abort(arguments["names"]) if self._state is not None else 0
            case "kept":
                return await answer_peer(self._state.responses, **arguments) if self._state is not None else None
            case _:
                raise EngineError(f"an API process has no answer for {verb!r}")

    async def _begin(
        self,
        fds: tuple[int, ...],
        engine: str,
        row: int,
        num_rows: int,
        app: dict[str, Any],
        listener: dict[str, Any],
        otlp_traces_endpoint: str | None,
    ) -> bool:
        """Returns once it listens."""
        *shared, board_fd = fds
        board = Board(num_rows, board_fd)
        os.close(board_fd)
        llm = AsyncLLM.attach(engine)
        if otlp_traces_endpoint is not None:
            from actorllm.client.request_spans import otlp_provider

            app["tracer_provider"] = otlp_provider(otlp_traces_endpoint, {"service.instance.id": str(row)})
        made = create_app(llm, **app)
        self._state = made.state.server
        self._state.join(board, row, OtherProcesses(self._line))
        where = Listener(**listener)
        self._drain_timeout_s = where.drain_timeout_s
        await warm_up(made)
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the process
        started = anyio.Event()
        self._server = Server(config_of(where, made), started.set)
        bound = Bound([socket.socket(fileno=fd) for fd in shared])
        bound.listen()
        self._tasks.start_soon(self._serve, self._server, bound, llm)
        self._tasks.start_soon(self._state.watch_lag)
        await started.wait()
        return True

    async def _serve(self, server: Server, bound: Bound, llm: AsyncLLM) -> None:
        await server.serve(bound.sockets)
        llm.shutdown()
        gc.unfreeze()
        self._tasks.cancel_scope.cancel()


class OtherProcesses(Peers):
    """What one process asks the others of, through their owner. A process that does not answer counts as having nothing."""

    def __init__(self, line: ControlLine) -> None:
        self._line = line

    async def abort(self, names: Sequence[str] | None) -> int:
        return sum([int(await self._ask("abort", names=some) or 0) for some in _portions(names)])

    async def supervisor(self) -> dict[str, Any] | None:
        told: dict[str, Any] | None = await self._ask("supervisor")
        return told

    async def kept(self, **arguments: Any) -> dict[str, Any] | None:
        told: dict[str, Any] | None = await self._ask("kept", **arguments)
        return told

    async def _ask(self, verb: str, **arguments: Any) -> Any:
        try:
            return await self._line.ask(verb, ASK_TIMEOUT_S, **arguments)
        except (ActorLLMError, TimeoutError):
            return None


def _portions(names: Sequence[str] | None) -> Iterator[list[str] | None]:
    if names is None:
        yield None
        return
    portion: list[str] = []
    room = MAX_NAMES_BYTES
    for name in names:
        size = 6 * len(name) + 4  # as JSON, at most
        if size > MAX_NAMES_BYTES:
            continue  # too long to be the name of a request
        if size > room:
            yield portion
            portion, room = [], MAX_NAMES_BYTES
        portion.append(name)
        room -= size
    if portion:
        yield portion
