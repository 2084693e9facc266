"""`AttachServer`: the engine's side of attaching. It makes frontends of the programs that join.

Owns the engine's name, the socket under it, and every connection from outside. It runs on the engine thread, around the
supervisor. An engine without a name has none of this, and one that no program joins pays nothing. A program that joins
is a child of the supervisor that the supervisor did not start. It has a link of its own to the scheduler and hears of
the deaths that concern it. Its end is the loss of one link, and no death of the engine. Of an engine of several replicas it
is a child of each one's supervisor, and hears of what becomes of them (`tell`).

Invariants: only processes of the same user and the same version join. A joined process is watched by its socket and by
its pidfd, since an inherited duplicate can keep its socket open. Nothing that comes over a socket raises into the loop.
Nothing here waits for a process outside. Made by Engine; see `rendezvous` for the frames.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import anyio
from anyio.abc import TaskGroup

from actorllm import __version__
from actorllm.actors.child import receive_frame, send_frame
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, AsyncioLoop, current_loop
from actorllm.actors.load_board import LoadBoard
from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.topology import ActorSpec, LinkSpec, attached_frontend
from actorllm.attach.rendezvous import Claim, Peer, claim, peer_of
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import (
    ActorLLMError,
    AttachError,
    EngineDeadError,
    EngineError,
    EngineShutdownError,
    PeerLostError,
)
from actorllm.supervision.children import RemoteChild
from actorllm.supervision.supervisor import Supervisor

logger = logging.getLogger(__name__)

FIRST_OF_RELINKED = 1_000_000
"""Links that are made once more are numbered from here: the numbers of programs stay below."""

ACCEPT_PAUSE_S = 1.0
"""How long no connection is accepted when this process has no descriptor left."""

COUNTS_TIMEOUT_S = 2.0
"""How long a description waits for the scheduler's counts."""


class Joinable(Protocol):
    """The service that programs join: a supervisor, or a fleet."""

    @property
    def config(self) -> Any: ...
    @property
    def failure(self) -> EngineError | None: ...
    async def run(self, on_ready: Callable[[], object]) -> None: ...
    def request_stop(self, timeout: float) -> None: ...
    def kill(self) -> None: ...


class OwnFrontend(Protocol):
    """What the owner has for its own requests; asked for what it knows of the engine."""

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None: ...
    async def ask_scheduler(self, verb: str, **arguments: Any) -> Any: ...


class AttachServer:
    """A Service (see `engine_thread`): the engine's life, and beside it the answers to programs that come by name.

    supervisors: of the replicas that run now, by number. board: what programs read and write beside the rings, with its file;
    None: there is one replica, and nothing to choose. places: where the replicas of other machines are, which programs call.
    draining: the numbers of those that take no new requests.
    """

    def __init__(
        self,
        name: str,
        service: Joinable,
        frontend: OwnFrontend,
        supervisors: Callable[[], Mapping[int, Supervisor]],
        board: tuple[LoadBoard, MemoryFile] | None = None,
        places: Callable[[], Mapping[int, Mapping[str, Any]]] = dict,
        draining: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self.name = name
        self._service = service
        self._frontend = frontend
        self._supervisors = supervisors
        self._board = board
        self._places = places
        self._draining = draining
        self._loop: AsyncioLoop
        self._claim: Claim | None = None
        self._state = "starting"
        self._began = now()
        self._visitors: set[Visitor] = set()
        self._waiting: list[Visitor] = []
        self._num_joined = self._num_relinked = 0

    async def run(self, on_ready: Callable[[], object]) -> None:
        self._loop = current_loop()
        self._began = now()
        self._claim = claim(self.name)
        reason: ActorLLMError = EngineShutdownError(f"engine {self.name!r} was shut down")
        try:
            self._loop.watch(self._claim.listener.fileno(), self._on_visit)
            await self._service.run(partial(self._open, on_ready))
        except ActorLLMError as error:
            reason = EngineDeadError(f"engine {self.name!r} did not start: {error}")
            raise
        finally:
            self._state = "stopping"
            self._loop.unwatch(self._claim.listener.fileno())
            for visitor in list(self._visitors):
                visitor.see_out(reason)
            self._claim.release()

    def request_stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        self._state = "stopping"
        self._service.request_stop(timeout)

    def kill(self) -> None:
        self._service.kill()

    @property
    def num_attached(self) -> int:
        """Programs that have joined and are still there."""
        return sum(visitor.is_joined for visitor in list(self._visitors))

    @property
    def is_ending(self) -> bool:
        """The engine ends, and not one of its replicas alone."""
        return self._state == "stopping" or self._service.failure is not None

    def _open(self, on_ready: Callable[[], object]) -> None:
        if self._state == "starting":
            self._state = "running"
        on_ready()
        waiting, self._waiting = self._waiting, []
        for visitor in waiting:
            self._join(visitor)

    # Visitors

    def _on_visit(self) -> None:
        assert self._claim is not None
        listener = self._claim.listener
        while True:
            try:
                control, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.error("engine %r accepts no program: %s", self.name, error)
                self._loop.unwatch(listener.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._reopen)
                return
            self._visitors.add(Visitor(self, control, self._loop))

    def _reopen(self) -> None:
        if self._claim is not None and self._state != "stopping":
            self._loop.watch(self._claim.listener.fileno(), self._on_visit)

    def forget(self, visitor: Visitor) -> None:
        """It is gone, or was seen out."""
        self._visitors.discard(visitor)
        if visitor in self._waiting:
            self._waiting.remove(visitor)
        if self._board is not None and visitor.number:
            self._board[0].remove_program(visitor.number)
        for child in visitor.children.values():
            child.supervisor.dismiss(child.spec.name, PeerLostError(f"the attached process {visitor.peer.pid} is gone"))

    def on_frame(self, visitor: Visitor, frame: dict[str, Any]) -> None:
        """What a visitor wants. An ActorLLMError is its refusal; anything else means that the frame made no sense."""
        match frame["op"]:
            case "hello":
                self._greet(visitor, str(frame["version"]))
            case "join" if visitor.is_welcome and not visitor.is_joined and visitor not in self._waiting:
                self._check_open()
                if self._state == "starting":
                    self._waiting.append(visitor)
                else:
                    self._join(visitor)
            case "relink" if visitor.is_joined:
                self._relink(visitor, int(frame["replica"]), str(frame["link"]))
            case "describe":
                self._describe(visitor)
            case "leave":
                visitor.close()
            case op:
                raise AttachError(f"engine {self.name!r} does not expect {op!r} now")

    def _greet(self, visitor: Visitor, version: str) -> None:
        if version != __version__:
            raise AttachError(
                f"engine {self.name!r} (process {os.getpid()}) runs actorllm {__version__} and the process that wants to "
                f"join has {version}; use the same version in both"
            )
        self._check_open()
        visitor.is_welcome = True
        visitor.send("welcome", pid=os.getpid(), config=self._config().to_json().decode())

    def _check_open(self) -> None:
        if self._state == "stopping":
            raise EngineShutdownError(f"engine {self.name!r} is shutting down")

    def _config(self) -> EngineConfig:
        """As another process needs it: without paths that depend on where this one runs."""
        config = cast(EngineConfig, self._service.config)
        tokenizer = config.model.tokenizer
        if tokenizer is not None and Path(tokenizer).exists():
            tokenizer = os.path.abspath(tokenizer)
        return replace(config, model=replace(config.model, tokenizer=tokenizer))

    def _join(self, visitor: Visitor) -> None:
        self._num_joined += 1
        visitor.number = self._num_joined
        try:
            visitor.watch_process()
            for number, supervisor in sorted(self._supervisors().items()):
                self._admit(visitor, number, supervisor)
        except ProcessLookupError:
            visitor.close()
        except (ActorLLMError, OSError) as error:
            visitor.see_out(AttachError(f"engine {self.name!r} cannot take another frontend: {error}"))
        else:
            visitor.is_joined = True
            fds: tuple[int, ...] = ()
            if self._board is not None:
                self._board[0].add_program(visitor.number)
                fds = (self._board[1].fd,)
            for number, place in sorted(self._places().items()):
                visitor.send("remote", replica=number, place=place)
            for number in self._draining():
                visitor.send("draining", replica=number, is_draining=True)
            visitor.send("joined", fds, config=self._config().to_json().decode(), number=visitor.number)
            logger.info("process %d joined engine %r as number %d", visitor.peer.pid, self.name, visitor.number)

    def _admit(self, visitor: Visitor, replica: int, supervisor: Supervisor, number: int = 0) -> None:
        spec, link = attached_frontend(number or visitor.number)
        child = visitor.children[replica] = AttachedChild(spec, visitor, replica, supervisor, self)
        try:
            supervisor.admit(child, link)
        except BaseException:
            visitor.children.pop(replica, None)
            raise

    def _relink(self, visitor: Visitor, replica: int, lost: str) -> None:
        """A scheduler has dropped a link of this program, and goes on. To it, what comes by another one is a new program.

        lost: the name of the link. It may be asked for once more while the answer is on its way.
        """
        child, supervisor = visitor.children.get(replica), self._supervisors().get(replica)
        if child is not None:
            if LinkSpec.pair("scheduler", child.spec.name).name != lost:
                return
            del visitor.children[replica]
            child.gone.set()
            child.supervisor.dismiss(
                child.spec.name, PeerLostError(f"the attached process {visitor.peer.pid} gets another link")
            )
        if supervisor is None:
            return  # every program gets a link when it runs again
        self._num_relinked += 1  # numbers of programs are rows of the board
        try:
            self._admit(visitor, replica, supervisor, FIRST_OF_RELINKED + self._num_relinked)
        except (ActorLLMError, OSError) as error:  # it asks again
            logger.error("process %d gets no link to replica %d: %s", visitor.peer.pid, replica, error)

    # What a fleet tells of its replicas

    def serve(
        self,
        frontend: OwnFrontend,
        supervisors: Callable[[], Mapping[int, Supervisor]],
        board: tuple[LoadBoard, MemoryFile],
        places: Callable[[], Mapping[int, Mapping[str, Any]]],
        draining: Callable[[], Iterable[int]],
    ) -> None:
        """A fleet has taken the place of the one replica that there was, before any program joined. Arguments as at first."""
        self._frontend, self._supervisors, self._board = frontend, supervisors, board
        self._places, self._draining = places, draining

    def admit_all(self, replica: int, supervisor: Supervisor) -> None:
        """A replica runs that did not, and everything that has joined gets a link to it."""
        for visitor in list(self._visitors):
            if visitor.is_joined and replica not in visitor.children:
                try:
                    self._admit(visitor, replica, supervisor)
                except (ActorLLMError, OSError) as error:  # it goes on with the others
                    logger.error("process %d gets no link to replica %d: %s", visitor.peer.pid, replica, error)

    def tell(self, op: str, **fields: Any) -> None:
        """A frame for every program that has joined."""
        for visitor in list(self._visitors):
            if visitor.is_joined:
                visitor.send(op, **fields)

    def farewell(self) -> EngineError:
        """Why the engine leaves its attached frontends."""
        failure = self._service.failure
        if failure is not None:
            return EngineDeadError(str(failure))
        return EngineShutdownError(f"engine {self.name!r} was shut down by its owner (process {os.getpid()})")

    def _describe(self, visitor: Visitor) -> None:
        description: dict[str, Any] = {
            "model": self._config().model.name,
            "version": __version__,
            "state": self._state,
            "uptime_s": round(now() - self._began, 3),
            "num_frontends": 1 + self.num_attached,
            "num_replicas": len(self._supervisors()) + len(self._places()) if self._state == "running" else None,
            "num_running": None,
            "num_waiting": None,
        }
        if self._state == "running":
            self._frontend.start_soon(self._describe_later, visitor, description)
        else:
            visitor.send("description", **description)

    async def _describe_later(self, visitor: Visitor, description: dict[str, Any]) -> None:
        # It is ending, busy, or started again just now: what is known is sent.
        with contextlib.suppress(ActorLLMError), anyio.move_on_after(COUNTS_TIMEOUT_S):
            counts = (await self._frontend.ask_scheduler("statistics"))["scheduler"]
            description |= {name: counts[name] for name in ("num_running", "num_waiting")}
        visitor.send("description", **description)


class Visitor:
    """One connection from outside."""

    def __init__(self, reception: AttachServer, control: socket.socket, loop: AsyncioLoop) -> None:
        self.peer: Peer = peer_of(control)
        self.is_welcome = False
        """It has shown that its version fits."""
        self.is_joined = False
        self.number = 0
        """Of those that have joined since the engine started, from 1 on."""
        self.children: dict[int, AttachedChild] = {}
        """What it is to the supervisor of each replica that runs, by number."""
        self._reception = reception
        self._control: socket.socket | None = control
        self._loop = loop
        self._pidfd = -1
        control.setblocking(False)
        loop.watch(control.fileno(), self._on_readable)

    def send(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """Nothing is sent to a visitor that is gone; one that does not read its socket is not waited for, and is closed."""
        if self._control is None:
            return
        try:
            send_frame(self._control, op, fds, **fields)
        except (BrokenPipeError, ConnectionResetError):
            return  # the end of the socket says so next
        except OSError as error:
            logger.warning("process %d does not read its control socket and is dropped: %s", self.peer.pid, error)
            self._loop.call_soon(self.close)

    def watch_process(self) -> None:
        """From now on its death is seen, whichever process still holds its socket. ProcessLookupError: it is dead."""
        if self.peer.pid:
            self._pidfd = os.pidfd_open(self.peer.pid)
            self._loop.watch(self._pidfd, self.close)

    def see_out(self, error: ActorLLMError) -> None:
        """Say why, and close."""
        self.send("refused", type_name=type(error).__name__, message=str(error))
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._control is None:
            return
        self._loop.unwatch(self._control.fileno())
        self._control.close()
        self._control = None
        if self._pidfd >= 0:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
        self.is_joined = False
        for child in self.children.values():
            child.gone.set()
        self._reception.forget(self)
        self.children.clear()

    def _on_readable(self) -> None:
        while self._control is not None:
            try:
                frame, fds = receive_frame(self._control)
                for fd in fds:
                    os.close(fd)
                if frame is None:
                    self.close()
                    return
                if self.peer.uid != os.geteuid():
                    raise AttachError(
                        f"engine {self._reception.name!r} is run by uid {os.geteuid()} and this process by uid "
                        f"{self.peer.uid}; only processes of the same user can join"
                    )
                self._reception.on_frame(self, frame)
            except BlockingIOError:
                return
            except ActorLLMError as error:
                self.see_out(error)
            except Exception as error:  # what another program sends may be anything; it is seen out alone
                logger.warning("process %d sent nonsense to engine %r: %r", self.peer.pid, self._reception.name, error)
                self.close()


class AttachedChild(RemoteChild):
    """A frontend in another program, as the supervisor sees it. The engine did not start it, so it has no start here."""

    def __init__(
        self, spec: ActorSpec, visitor: Visitor, replica: int, supervisor: Supervisor, reception: AttachServer
    ) -> None:
        super().__init__(spec, lambda *_: None)
        self.phase = "running"
        self.supervisor = supervisor
        self._replica = replica
        self._visitor = visitor
        self._reception = reception

    def _send(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        self._visitor.send(op, fds, replica=self._replica, **fields)

    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        # Supervisor.admit takes it in where others have been started already.
        raise NotImplementedError(f"{self.spec.name} was started by another program")

    async def start(self, config: Any) -> dict[str, Any]:
        return {}

    async def configure(self, config: Any) -> None:
        """It was told with the welcome."""

    async def run(self) -> None:
        """It does."""

    def request_stop(self) -> None:
        if self._reception.is_ending:
            error = self._reception.farewell()
            self._visitor.send("bye", type_name=type(error).__name__, message=str(error))
            self._visitor.close()
        elif self._visitor.children.pop(self._replica, None) is self:
            self.gone.set()  # the fleet tells of it

    def kill(self) -> None:
        """It is not ours to kill."""

    def close(self) -> None:
        if self._visitor.children.get(self._replica) is self:
            self._visitor.close()

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {"pid": self._visitor.peer.pid}
