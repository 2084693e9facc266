"""`AttachClient`: what a program that joined the engine of another program has in place of a supervisor.

Owns the connection to the engine's `AttachServer`, and the frontend actor of this process. It joins, and installs the ring
pair whose descriptors come over the connection. It installs another one whenever the scheduler was started again, and
it watches the owner. Everything else goes through the rings.

`meet` asks a running engine what it is. An engine of several replicas is joined by a subclass (`fleet.attached`).

Invariants: the constructor leaves nothing open when it raises. The end of the owner ends every stream of this process
with an error, after what was in the ring has been delivered. Leaving touches only the requests of this process. A
Service (see `engine_thread`), made by AttachedEngine.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup

from actorllm import __version__
from actorllm.actors.child import error_of_loss, receive_frame, send_frame
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, AsyncioLoop, current_loop
from actorllm.actors.frontend import FrontendActor
from actorllm.actors.link import LinkInfo
from actorllm.actors.topology import ActorSpec
from actorllm.attach.rendezvous import connect, error_of, exchange, peer_of
from actorllm.config import EngineConfig
from actorllm.errors import (
    ActorLLMError,
    CorruptLinkError,
    EngineDeadError,
    EngineError,
    EngineShutdownError,
    PeerRestartedError,
)
from actorllm.ring.channel import LinkEnd
from actorllm.supervision.children import OwnerChild
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.health import ActorHealth, EngineHealth, EngineState


@dataclass(frozen=True, slots=True)
class Met:
    """A running engine that has answered, and the connection to it, which the holder of this owns."""

    name: str
    control: socket.socket
    config: EngineConfig
    watched_pid: int
    """Of its owner; 0: the kernel does not tell."""
    owner_pid: int


def meet(name: str) -> Met:
    """Find the engine of this name and learn what it is. Waits for one short answer.

    Raises EngineNotFoundError, AttachError, EngineShutdownError or EngineDeadError.
    """
    control = connect(name)
    try:
        welcome = exchange(control, name, "hello", version=__version__)
        watched_pid = peer_of(control).pid
        config = EngineConfig.from_json(welcome["config"])
        return Met(name, control, config, watched_pid, watched_pid or welcome["pid"])
    except BaseException:
        control.close()
        raise


class AttachClient:
    """One frontend of an engine that another process owns. It is joined by `run`."""

    def __init__(self, met: Met) -> None:
        """met: the engine, whose connection this takes."""
        self.name = met.name
        self._control: socket.socket | None = met.control
        self.config = met.config
        self._watched_pid = met.watched_pid
        self.owner_pid = met.owner_pid
        self.frontend = FrontendActor()
        self.on_loss: Callable[[EngineError], None] = lambda error: None
        """Hears, on the loop, why the engine is gone, before any stream does."""
        self._loop: AsyncioLoop
        self._child: OwnerChild
        self._pidfd = -1
        self._is_joined = False
        self._changed: anyio.Event | None = None  # made on the loop: the constructor may run under another library
        self._error: ActorLLMError | None = None
        self._is_stop_requested = False
        self._stop_timeout_s = STOP_TIMEOUT_S

    @property
    def pids(self) -> dict[str, int]:
        """None: the processes are the owner's."""
        return {}

    def health(self) -> EngineHealth:
        """Of what this process sees of it: its own frontend, and whether there is a scheduler."""
        state: EngineState = "new"
        if self._error is not None:
            state = "dead" if isinstance(self._error, EngineDeadError) else "stopped"
        elif self._is_joined:
            state = "running" if self.frontend.is_linked else "recovering"
        counts = self.frontend.num_recoveries, self.frontend.max_recovery_s
        last_failure = None if self._error is None else str(self._error)
        return EngineHealth(state, {"frontend": ActorHealth(state, None, 1, None)}, *counts, last_failure)

    def statistics(self) -> dict[str, Any]:
        return {"phase": "attached" if self._is_joined else "met", "engine": self.name, "owner_pid": self.owner_pid}

    async def run(self, on_ready: Callable[[], object]) -> None:
        self._loop = current_loop()
        self._changed = anyio.Event()
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            try:
                await self._start_frontends(tasks)
                await self._join()
                await self._run_frontends()
                on_ready()
                await self._until(lambda: False)
            except Exception as error:  # raised outside of the group, which would wrap it
                failure = error
            finally:
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(self._stop_timeout_s):
                        await self._stop_frontends()
                    self._leave()
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    # The frontends: one for each replica

    async def _start_frontends(self, tasks: TaskGroup) -> None:
        self._child = OwnerChild(ActorSpec("frontend", "", placement="owner"), self._on_frontend_end, self.frontend)
        await self._child.spawn(tasks, self.config)
        await self._child.start(self.config)

    async def _run_frontends(self) -> None:
        await self._child.run()

    async def _stop_frontends(self) -> None:
        self._child.request_stop()
        await self._child.gone.wait()

    def _fail_frontends(self, error: EngineError) -> None:
        lose_links(self.frontend, self._child, error)
        self.frontend.fail_all(error)

    # The engine

    async def _join(self) -> None:
        if self._control is None:
            raise EngineShutdownError("the engine was left before it was joined")
        self._control.setblocking(False)
        self._loop.watch(self._control.fileno(), self._on_readable)
        try:
            if self._watched_pid:
                self._pidfd = os.pidfd_open(self._watched_pid)
                self._loop.watch(self._pidfd, self._on_owner_end)
            send_frame(self._control, "join")
        except (ProcessLookupError, BrokenPipeError, ConnectionResetError):
            self._on_readable()
            self._on_owner_end()
        await self._until(lambda: self._is_joined)  # an engine that still starts answers when it is ready
        if not self._is_joined:
            raise self._error or EngineShutdownError("the engine was left while it was being joined")

    async def _until(self, is_true: Callable[[], bool]) -> None:
        """Wait until it is so, or the engine is gone, or it is to be left."""
        while not (is_true() or self._error is not None or self._is_stop_requested):
            assert self._changed is not None
            await self._changed.wait()
            self._changed = anyio.Event()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def request_stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        self._stop_timeout_s = timeout
        self._is_stop_requested = True
        self._wake()

    def kill(self) -> None:
        """There is no process of ours."""

    def close(self) -> None:
        """For a membership that never ran. Idempotent."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def _send(self, op: str, **fields: Any) -> None:
        """A frame to the owner; nothing happens if that is gone, or does not read."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                send_frame(self._control, op, **fields)

    # What the owner says

    def _on_readable(self) -> None:
        while self._control is not None and self._error is None:
            try:
                frame, fds = receive_frame(self._control)
            except BlockingIOError:
                return
            if frame is None:
                self._end(self._owner_died())
                return
            try:
                self._obey(frame, fds)
            except (ActorLLMError, OSError) as error:  # no memory or descriptor left for the rings
                self._end(EngineDeadError(f"engine {self.name!r} cannot be joined: {error}"))

    def _obey(self, frame: dict[str, Any], fds: tuple[int, ...]) -> None:
        match frame["op"]:
            case "link":
                install_link(self._child, frame, fds)
            case "joined":
                self._note_joined(frame)
            case "lost":
                loss = error_of_loss(frame)
                if isinstance(loss, PeerRestartedError):
                    self._child.lose(frame["link"], frame["generation"], loss)
                else:
                    self._end(EngineDeadError(str(loss)))
            case "bye" | "refused":
                error = error_of(frame)
                self._end(error if isinstance(error, EngineError) else EngineDeadError(str(error)))
            case op:
                raise CorruptLinkError(f"the control frame {op!r} is unknown")

    def _note_joined(self, frame: dict[str, Any]) -> None:
        self.config = EngineConfig.from_json(frame["config"])
        self._is_joined = True
        self._wake()

    def _owner_died(self) -> EngineDeadError:
        return EngineDeadError(f"the process that owns engine {self.name!r} (pid {self.owner_pid}) died")

    def _on_owner_end(self) -> None:
        self._on_readable()  # a farewell, if there is one
        self._end(self._owner_died())

    def _on_frontend_end(self, child: Any, death: ActorDeath) -> None:
        self._end(death.to_error())

    def _end(self, error: EngineError) -> None:
        """The engine is gone. What it had sent is delivered first."""
        if self._error is not None:
            return
        self._error = error
        self.on_loss(error)
        self._fail_frontends(error)
        self._wake()

    def _leave(self) -> None:
        """The owner sees the end of the socket, and forgets the requests of this process."""
        if self._control is not None:
            self._loop.unwatch(self._control.fileno())
        if self._pidfd >= 0:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self.close()


def install_link(child: OwnerChild, frame: dict[str, Any], fds: tuple[int, ...]) -> None:
    """Give a frontend the ring pair that the owner has made for it. Raises OSError."""
    end = LinkEnd(frame["generation"], frame["num_spokes"], frame["index"], fds)
    child.install_ring(LinkInfo.from_json(frame["info"]), end)


def lose_links(frontend: FrontendActor, child: OwnerChild, error: EngineError) -> None:
    """The other end is gone. What it had sent is delivered first."""
    for link in list(frontend.links.values()):
        child.runner.lose(link.name, link.generation, error)
