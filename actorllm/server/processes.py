"""`ApiProcesses`: several API processes on one engine, started one for one when they die.

The owner holds the engine and the listening socket, and serves nothing itself. Each API process joins the engine by name
(`AsyncLLM.attach`) and accepts from the same socket. So one that dies loses its own connections and nothing else. Its
place is taken again after a pause that doubles while deaths follow each other. Numbers that all of them must know are on the
`Board`, questions to the others go through here. Called by `actorllm serve --api-processes N`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import anyio
from anyio import to_thread

from actorllm.actors.child import FOR_THE_OWNER
from actorllm.actors.search_path import search_path
from actorllm.actors.shortage import above_standard_streams
from actorllm.api.async_llm import AsyncLLM
from actorllm.clock import now
from actorllm.errors import ActorLLMError, ConfigError, EngineError, PeerLostError, innermost
from actorllm.server.board import Board
from actorllm.server.launcher import GRACE_S, config_of, drain_engine, end_on_signal
from actorllm.server.line import ControlLine
from actorllm.server.listener import Listener

logger = logging.getLogger(__name__)

SERVE_TIMEOUT_S = 120.0
"""How long a process may take to import, join and listen."""
ASK_TIMEOUT_S = 2.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
STEADY_S = 10.0
"""A process that has lived so long is started again as if it were the first death."""

PROGRAM = "import json,sys; sys.path[:] = json.loads(sys.argv[3]); from actorllm.server.api_process import main; main()"


class ApiProcess:
    """One life of one of them."""

    def __init__(self, owner: ApiProcesses, row: int) -> None:
        self._owner = owner
        self._row = row
        self.is_ready = False
        self.failure: Exception | None = None
        """Why it does not serve, in its own words."""
        control, theirs = above_standard_streams(partial(socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET))
        # Inherited until the child ignores them: a Ctrl-C is for the owner.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_OWNER)
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    PROGRAM,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    json.dumps(search_path()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._control = control
        self.pid = self._process.pid
        self.line = ControlLine(control, self._answer)

    async def live(self) -> int:
        """From the spawn to the end; returns the exit status."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._begin)
                await self.line.run()
                tasks.cancel_scope.cancel()
            return await to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        finally:
            self.kill()
            self._process.wait()
            self._control.close()

    async def _begin(self) -> None:
        try:
            self.is_ready = await self.line.ask("serve", SERVE_TIMEOUT_S, **self._owner.orders(self._row))
        except PeerLostError:
            return  # it is gone, which the end of its line says as well
        except (ActorLLMError, TimeoutError) as error:
            self.failure = error
            self.kill()
        self._owner.note_ready()

    def kill(self) -> None:
        self._process.kill()

    async def _answer(self, verb: str, arguments: dict[str, Any], fds: tuple[int, ...]) -> Any:
        match verb:
            case "abort":
                return await self._owner.abort_elsewhere(self, arguments["names"])
            case "kept":
                return await self._owner.ask_elsewhere(self, "kept", arguments)
            case "supervisor":
                counts = self._owner.llm._engine.statistics()["supervisor"]
                return {name: counts[name] for name in ("num_recoveries", "recovery_s")}
            case _:
                raise EngineError(f"the owner of API processes has no answer for {verb!r}")


class ApiProcesses:
    def __init__(
        self,
        llm: AsyncLLM,
        number: int,
        app: dict[str, Any],
        listener: Listener,
        otlp_traces_endpoint: str | None = None,
    ) -> None:
        """llm: an engine with a name. app: the arguments of `create_app`, as JSON values."""
        if llm.config.name is None:
            raise ConfigError("several API processes need an engine with a name")
        self.llm = llm
        self._app = app
        self._listener = listener
        self._otlp_traces_endpoint = otlp_traces_endpoint
        self._number = number
        self._processes: dict[int, ApiProcess] = {}
        self._starting = anyio.CancelScope()
        self._is_ending = False
        self._ending = anyio.Event()
        self._settled = anyio.Event()
        """All of them serve, or none is to any more."""

    async def run(self) -> None:
        """Start the engine, serve until a signal comes and everything is answered, and end it.

        Raises ConfigError when that cannot begin, and what kept the engine from starting.
        """
        config_of(self._listener, _nobody)  # says what is wrong with it, and configures logging
        self._bound = self._listener.bind()
        self._board_fd = Board.share(self._number)
        self._board = Board(self._number, self._board_fd)
        try:
            async with anyio.create_task_group() as group:
                await group.start(end_on_signal, self._drain, self._kill)
                try:
                    with self._starting:
                        logger.info(
                            "the engine starts; then the server listens on %s", self._listener.place(self._bound)
                        )
                        await self.llm.start()
                    if not self._is_ending:
                        await self._serve()
                finally:
                    group.cancel_scope.cancel()
        except BaseExceptionGroup as group_of_one:
            raise innermost(group_of_one) from None
        finally:
            self._bound.close()
            self.llm.shutdown()
            os.close(self._board_fd)

    async def _serve(self) -> None:
        """Until the last of them has ended."""
        async with anyio.create_task_group() as lives:
            for row in range(self._number):
                lives.start_soon(self._keep, row)
            await self._settled.wait()
            if not self._is_ending:
                logger.info("%d API processes running on %s", self._number, self._listener.place(self._bound))

    def orders(self, row: int) -> dict[str, Any]:
        """What a process is told to serve."""
        return {
            "fds": (*(each.fileno() for each in self._bound.sockets), self._board_fd),
            "engine": self.llm.config.name,
            "row": row,
            "num_rows": self._number,
            "app": self._app,
            "listener": asdict(self._listener),
            "otlp_traces_endpoint": self._otlp_traces_endpoint,
        }

    def note_ready(self) -> None:
        if len(self._processes) == self._number and all(process.is_ready for process in self._processes.values()):
            self._settled.set()

    async def _keep(self, row: int) -> None:
        """Have a process in this place until the end."""
        pause_s = FIRST_PAUSE_S
        while not self._is_ending:
            began = now()
            process = self._processes[row] = ApiProcess(self, row)
            status = await process.live()
            del self._processes[row]
            self._board.clear(row)
            if self._is_ending:
                return
            why = process.failure or f"it ended with status {status}; the log above has the reason"
            if not self._settled.is_set() and not process.is_ready:
                raise ConfigError(f"an API process does not serve: {why}")
            if now() - began > STEADY_S:
                pause_s = FIRST_PAUSE_S
            if process.is_ready:
                told = "API process %d ended with status %d; its connections are lost, and it is started again in %g s"
                logger.error(told, process.pid, status, pause_s)
            else:
                logger.error("API process %d does not serve: %s; it is tried again in %g s", process.pid, why, pause_s)
            with anyio.move_on_after(pause_s):
                await self._ending.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def abort_elsewhere(self, asking: ApiProcess, names: Sequence[str] | None) -> int:
        counts: list[int] = []

        async def ask(process: ApiProcess) -> None:
            with contextlib.suppress(ActorLLMError, TimeoutError):  # it is gone, and its requests with it
                counts.append(await process.line.ask("abort", ASK_TIMEOUT_S, names=names))

        async with anyio.create_task_group() as tasks:
            for process in list(self._processes.values()):
                if process is not asking and process.is_ready:
                    tasks.start_soon(ask, process)
        return sum(counts)

    async def ask_elsewhere(self, asking: ApiProcess, verb: str, arguments: dict[str, Any]) -> Any:
        """The first answer that is not None."""
        answers: list[Any] = []

        async def ask(process: ApiProcess) -> None:
            with contextlib.suppress(ActorLLMError, TimeoutError):  # it is gone, with what it kept
                if (told := await process.line.ask(verb, ASK_TIMEOUT_S, **arguments)) is not None:
                    answers.append(told)
                    tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for process in list(self._processes.values()):
                if process is not asking and process.is_ready:
                    tasks.start_soon(ask, process)
        return answers[0] if answers else None

    def _begin_end(self) -> None:
        """No process that dies is started again from here on."""
        self._is_ending = True
        self._starting.cancel()
        self._ending.set()
        self._settled.set()

    async def _drain(self) -> None:
        self._begin_end()
        timeout_s = self._listener.drain_timeout_s

        async def ask(process: ApiProcess) -> None:
            with contextlib.suppress(ActorLLMError, TimeoutError):
                await process.line.ask("drain", ASK_TIMEOUT_S)

        async with anyio.create_task_group() as tasks:
            for process in list(self._processes.values()):
                if process.is_ready:
                    tasks.start_soon(ask, process)
                else:
                    process.kill()
            tasks.start_soon(drain_engine, self.llm, timeout_s)  # programs that joined the engine by themselves
        await anyio.sleep(timeout_s + 2 * GRACE_S)
        self._kill()

    def _kill(self) -> None:
        self._begin_end()
        for process in list(self._processes.values()):
            process.kill()


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    """The application of a process that serves none."""
