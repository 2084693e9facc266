"""Who starts, wires, watches and stops the actors of an engine. Runs on the engine thread as its service.

Owns every child: an actor on this loop, in a thread, or in a process of its own; with a process its control socket, its
pidfd and its stderr. The start has phases, each for all actors at once:

    spawn · start(config) → facts · resolve(config, facts) → resolved · configure(resolved) · link · run

Invariants:

- a start that fails, is cancelled or times out leaves nothing behind, and its exception is the child's own;
- processes are spawned from the engine thread only (the parent-death signal follows the thread), by exec;
- the end of a process is seen by its pidfd, that of any other actor by its runner; both become an `ActorDeath`;
- every (re)connection makes new links with the next generation for all their ends (`relink`);
- after `run` nothing of it exists: no process, zombie, thread, descriptor or shared memory.

Until a restart strategy exists, one death ends the engine: peers are told, `on_death` hears, everything is stopped.
Callers: the front doors, through EngineThread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from actorllm.actors import child as child_program
from actorllm.actors.actor import Actor, Failure, Runner
from actorllm.actors.child import receive_frame, send_frame
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, AsyncioLoop, LoopThread, current_loop
from actorllm.actors.link import Link, LinkInfo, connect_in_memory, open_ring
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology, load, path_of
from actorllm.errors import ActorLLMError, EngineDeadError, EngineShutdownError, EngineStartError
from actorllm.ring.channel import LinkEnd, create_link
from actorllm.ring.segment import sweep_stale

logger = logging.getLogger(__name__)

MAX_LAST_WORDS = 20
"""Lines of a process's stderr that are kept."""
MAX_LINE = 500
"""Characters of such a line."""
MAX_STDERR_BACKLOG = 1 << 16
"""Bytes of stderr that wait while the owner's own stderr takes no more; the rest is cut, and the cut is reported."""
EXIT_GRACE_S = 2.0
"""How long a process that reported a failure may take to exit."""
KILL_TIMEOUT_S = 5.0
"""How long the kernel may take to end a killed process."""


class Config(Protocol):
    """What actors are configured with: frozen, and able to travel. `from_json` must be the inverse of `to_json`."""

    def to_json(self) -> bytes: ...

    @classmethod
    def from_json(cls, data: bytes | str) -> Any: ...


Resolve = Callable[[Any, dict[str, dict[str, Any]]], Any]
"""`(config, {actor: facts}) -> config`. What it raises is what the start raises."""


@dataclass(frozen=True, slots=True)
class ActorDeath:
    """The end of an actor that nobody had asked to end."""

    actor: str
    exit_code: int | None = None
    """Of a process that exited."""
    signal: int | None = None
    """Of a process that was killed."""
    failure: Failure | None = None
    """The exception that it reported."""
    last_words: tuple[str, ...] = ()
    """The last lines that the process wrote to its stderr."""

    @property
    def description(self) -> str:
        """What follows the name: "was killed by signal 9 (SIGKILL)"."""
        if self.failure is not None:
            return f"failed with {self.failure.summary}"
        if self.signal is not None:
            return f"was killed by signal {self.signal} ({_signal_name(self.signal)})"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        return "ended by itself"

    def __str__(self) -> str:
        quoted = "".join(f"\n    {line}" for line in self.last_words)
        return f"{self.actor} {self.description}" + (f"; its last words:{quoted}" if quoted else "")

    def to_error(self) -> EngineDeadError:
        """What every user of the engine gets."""
        error = EngineDeadError(str(self))
        if self.failure is not None:
            error.add_note(f"In {self.actor}:\n{self.failure.traceback}")
        return error

    def to_start_error(self) -> ActorLLMError:
        """What the one who started the engine gets."""
        if self.failure is not None:
            return self.failure.to_start_error(self.actor)
        return EngineStartError(f"the engine did not start: {self}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class Supervisor:
    """Makes a Topology real and keeps watch over it. Everything but `kill` is called on the engine's loop.

    config: given to every `on_start`. resolve: makes the final configuration from the facts (default: unchanged).
    on_death: hears of a death before everything is stopped. actors: owner-placed actors that exist already, by name.
    """

    def __init__(
        self,
        topology: Topology,
        config: Config,
        *,
        resolve: Resolve | None = None,
        on_death: Callable[[ActorDeath], None] | None = None,
        actors: Mapping[str, Actor] | None = None,
        start_timeout_s: float | None = None,
    ) -> None:
        self.topology = topology
        self.config = config
        """The resolved configuration, once the start is through."""
        self.failure: EngineDeadError | None = None
        """Why the engine is dead."""
        self._resolve = resolve
        self._on_death = on_death
        self._actors = dict(actors or {})
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._children: dict[str, Child] = {}
        self._generations: dict[str, int] = {}
        self._links: dict[str, LinkSpec] = {}
        self._start_scope: anyio.CancelScope | None = None
        self._start_error: ActorLLMError | None = None
        self._phase = "new"
        self._over: anyio.Event | None = None  # made on the loop: the constructor may run under another library
        self._is_stop_requested = False

    def actor(self, name: str) -> Actor:
        """An owner-placed actor. KeyError when it is none."""
        return self._actors[name]

    @property
    def pids(self) -> dict[str, int]:
        """The processes that live, by actor. From any thread."""
        children = [child for child in list(self._children.values()) if isinstance(child, ProcessChild)]
        return {child.spec.name: child.pid for child in children if child.pid is not None and not child.gone.is_set()}

    async def run(self, on_ready: Callable[[], object]) -> None:
        """The engine's whole life (see `engine_thread.Service`)."""
        if self._is_stop_requested:
            raise EngineShutdownError("the engine was shut down before it was started")
        over = self._over = anyio.Event()
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            try:
                await self._start(tasks)
                self._phase = "running"
                on_ready()
                await over.wait()
            except Exception as error:
                failure = error  # raised outside of the group, which would wrap it
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop(is_started=self._phase == "running")
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def request_stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        self._stop_timeout_s = timeout
        self._is_stop_requested = True
        if self._start_scope is not None:
            self._start_scope.cancel()
        if self._over is not None:
            self._over.set()

    def kill(self) -> None:
        for child in list(self._children.values()):
            child.kill()

    def relink(self, *names: str) -> None:
        """New links with the next generation wherever one of these actors is an end, for all ends."""
        for link in self._links_of(*names):
            self._connect(link)

    def admit(self, child: Child, link: LinkSpec) -> None:
        """An actor that runs already joins the tree, by one link. Its end is told by `dismiss`, and is no death.

        Raises EngineShutdownError when the engine does not run, SharedMemoryError or OSError when a link cannot be made.
        """
        if self._phase != "running":
            raise EngineShutdownError(f"the engine is {self._phase}")
        self._children[child.spec.name] = child
        try:
            self._connect(link)
        except BaseException:
            self.dismiss(child.spec.name, EngineShutdownError("it was not admitted"))
            raise

    def dismiss(self, name: str, error: ActorLLMError) -> None:
        """An admitted actor is gone: its peers lose their links to it. Nothing happens while everything is stopped."""
        if self._phase != "running" or self._children.pop(name, None) is None:
            return
        for link in self._links_of(name):
            for end in link.ends:
                if end != name:
                    self._children[end].lose(link.name, self._generations[link.name], error)
            del self._links[link.name], self._generations[link.name]

    def statistics(self) -> dict[str, Any]:
        """Of the tree; that of an actor is its answer to "statistics"."""
        return {
            "phase": self._phase,
            "actors": {name: child.statistics() for name, child in self._children.items()},
            "generations": dict(self._generations),
        }

    # Start

    async def _start(self, tasks: TaskGroup) -> None:
        self._phase = "starting"
        timeout_s = math.inf if self._start_timeout_s is None else self._start_timeout_s
        with anyio.CancelScope() as self._start_scope:  # cancelled by a death or by request_stop
            try:
                with anyio.move_on_after(timeout_s) as in_time:
                    await self._start_phases(tasks)
            except Exception as error:
                if self._start_error is not None:
                    raise self._start_error from error
                raise
        self._start_scope = None
        if self._start_error is not None:
            raise self._start_error
        if self._is_stop_requested:
            raise EngineShutdownError("the engine was shut down while it started")
        if in_time.cancelled_caught:
            late = [f"{name} ({child.phase})" for name, child in self._children.items() if child.phase != "running"]
            raise EngineStartError(f"the engine was not ready within {timeout_s:g} s; waiting for {', '.join(late)}")

    async def _start_phases(self, tasks: TaskGroup) -> None:
        if any(spec.placement == "process" for spec in self.topology.actors):
            sweep_stale()
        loop = current_loop()
        for spec in self.topology.actors:
            child = self._new_child(spec, loop)
            await child.spawn(tasks, self.config)
            self._children[spec.name] = child
        facts = await self._each(lambda child: child.start(self.config))
        if self._resolve is not None:
            self.config = self._resolve(self.config, facts)
        await self._each(lambda child: child.configure(self.config))
        for link in self.topology.links:
            self._connect(link)
        await self._each(lambda child: child.run())

    def _new_child(self, spec: ActorSpec, loop: AsyncioLoop) -> Child:
        child = self._make_child(spec, loop)
        child.on_broken = self._on_broken
        return child

    def _make_child(self, spec: ActorSpec, loop: AsyncioLoop) -> Child:
        if spec.placement == "process":
            return ProcessChild(spec, self._on_end, loop)
        if spec.placement == "thread":
            return ThreadChild(spec, self._on_end, loop)
        if spec.name not in self._actors:
            self._actors[spec.name] = _new_actor(spec)
        return OwnerChild(spec, self._on_end, self._actors[spec.name])

    async def _each(self, step: Callable[[Child], Awaitable[Any]]) -> dict[str, Any]:
        """One phase: all actors at once, the first error ends it."""
        results: dict[str, Any] = {}
        failures: list[Exception] = []

        async def one(child: Child) -> None:
            try:
                results[child.spec.name] = await step(child)
            except Exception as error:
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for child in self._children.values():
                group.start_soon(one, child)
        if failures:
            raise failures[0]
        return results

    def _connect(self, link: LinkSpec) -> None:
        generation = self._generations[link.name] = self._generations.get(link.name, 0) + 1
        self._links[link.name] = link
        children = [self._children[name] for name in link.ends]
        infos = link.infos({child.spec.name: child.spec.rank for child in children}, generation)
        if all(isinstance(child, LocalChild) for child in children):
            for child, end in zip(children, connect_in_memory(infos), strict=True):
                assert isinstance(child, LocalChild)
                child.install(end)
            return
        made = create_link(link.capacity_down, link.capacity_up, len(link.spokes), generation)
        ring_ends = deque((made.hub, *made.spokes))
        try:
            for child, info in zip(children, infos, strict=True):
                child.install_ring(info, ring_ends.popleft())
        finally:
            for ring_end in ring_ends:
                ring_end.close()

    # Watch

    def _on_end(self, child: Child, death: ActorDeath) -> None:
        """An actor ended that should not have."""
        if self._phase == "starting":
            if self._start_error is None and self._start_scope is not None:
                self._start_error = death.to_start_error()
                self._start_scope.cancel()
            return
        if self._phase != "running" or self._over is None or self._over.is_set():
            if death.exit_code != 0:
                logger.info("while the engine stopped: %s", death)
            return
        logger.error("%s", death)
        self.failure = death.to_error()
        try:
            self._tell_peers(child, self.failure)
            if self._on_death is not None:
                self._on_death(death)
        finally:
            self._over.set()

    def _on_broken(self, link: str, generation: int, error: str) -> None:
        """One end found the link corrupt, closed it and goes on: whoever is at the others has lost it."""
        spec = self._links.get(link)
        if spec is None or self._generations[link] != generation:
            return
        for name in spec.ends:
            self._children[name].lose(link, generation, EngineDeadError(f"the link was dropped: {error}"))

    def _tell_peers(self, dead: Child, error: EngineDeadError) -> None:
        for link in self._links_of(dead.spec.name):
            others = [link.hub] if dead.spec.name != link.hub else link.spokes
            for name in others:
                self._children[name].lose(link.name, self._generations[link.name], error)

    def _links_of(self, *names: str) -> list[LinkSpec]:
        return [link for link in self._links.values() if set(names) & set(link.ends)]

    # Stop

    async def _stop(self, is_started: bool) -> None:
        self._phase = "stopping"
        for child in self._children.values():
            if is_started or isinstance(child, LocalChild):
                child.request_stop()
            else:
                child.kill()  # half started: there is nothing to save, and it may be deep in loading a model
        with anyio.move_on_after(self._stop_timeout_s):
            for child in self._children.values():
                await child.gone.wait()
        for name, child in self._children.items():
            if not child.gone.is_set():
                logger.error("%s did not stop within %.1f s", name, self._stop_timeout_s)
                child.kill()
        with anyio.move_on_after(KILL_TIMEOUT_S):
            for child in self._children.values():
                if isinstance(child, ProcessChild):
                    await child.gone.wait()
        for child in self._children.values():
            child.close()
        self._phase = "stopped"


# Children -------------------------------------------------------------------------------------------------------------


class Child(ABC):
    """One life of one actor, wherever it runs. The supervisor's view: the same verbs for every placement."""

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None]) -> None:
        self.spec = spec
        self.phase = "spawned"
        self.gone = anyio.Event()
        """Nothing of it runs any more."""
        self.on_broken: Callable[[str, int, str], None] = lambda link, generation, error: None
        """Hears (link, generation, error) of a link that the actor found corrupt and goes on without."""
        self._on_end = on_end

    @abstractmethod
    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        """Make the place where it runs; leaves nothing behind if it raises."""

    @abstractmethod
    async def start(self, config: Any) -> dict[str, Any]:
        """`Actor.on_start`; returns its facts. This and the next two raise the error that the start ends with."""

    @abstractmethod
    async def configure(self, config: Any) -> None:
        """`Actor.on_configure`."""

    @abstractmethod
    async def run(self) -> None:
        """Start the main loop; returns when it is started."""

    @abstractmethod
    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        """Give it one end of a link over rings; the descriptors are taken over in any case."""

    @abstractmethod
    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        """Its peer on this link is dead."""

    @abstractmethod
    def request_stop(self) -> None:
        """Begin the orderly end. `gone` follows."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, if it can be. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Release what is left, gone or not."""

    def statistics(self) -> dict[str, Any]:
        return {"placement": self.spec.placement, "phase": self.phase}


class LocalChild(Child):
    """An actor in this process, on this loop or on that of its own thread."""

    runner: Runner

    @abstractmethod
    def install(self, link: Link) -> None:
        """Give it one end of a link."""

    def _report_broken(self, info: LinkInfo, error: BaseException) -> None:
        self.on_broken(info.name, info.generation, str(error))

    def _report_end(self, error: BaseException | None) -> None:
        self.phase = "failed" if error is not None else "ended"
        self._on_end(self, ActorDeath(self.spec.name, failure=None if error is None else Failure.of(error)))


class OwnerChild(LocalChild):
    """An actor on the engine thread's loop."""

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None], actor: Actor) -> None:
        super().__init__(spec, on_end)
        self.runner = Runner(actor, self._report_end, self._report_broken)

    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        alive = anyio.Event()
        tasks.start_soon(self._live, alive)
        await alive.wait()

    async def _live(self, alive: anyio.Event) -> None:
        try:
            await self.runner.live(alive.set)
        finally:
            self.gone.set()

    async def start(self, config: Any) -> dict[str, Any]:
        self.phase = "starting"
        return await self.runner.start(config)

    async def configure(self, config: Any) -> None:
        self.phase = "configuring"
        await self.runner.configure(config)

    async def run(self) -> None:
        self.runner.run()
        self.phase = "running"

    def install(self, link: Link) -> None:
        self.runner.install(link)

    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        self.runner.install(open_ring(info, end))

    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        self.runner.lose(link, generation, error)

    def request_stop(self) -> None:
        self.runner.stop()

    def kill(self) -> None:
        """It ends with this process."""

    def close(self) -> None:
        """Its runner has closed everything."""


class ThreadChild(LocalChild):
    """An actor on a loop and a thread of its own, for work that holds the loop."""

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None], loop: AsyncioLoop) -> None:
        super().__init__(spec, on_end)
        self._loop = loop
        self._thread = LoopThread(f"actorllm:{spec.name}")

    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        self.runner = Runner(_new_actor(self.spec), self._report_end_there, self._report_broken_there)
        alive = anyio.Event()
        self._thread.start_thread()
        living = self._thread.call(self.runner.live, lambda: self._loop.call_soon_threadsafe(alive.set))
        living.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self.gone.set))
        try:
            await alive.wait()
        except BaseException:
            self._thread.request_stop()
            raise

    async def start(self, config: Any) -> dict[str, Any]:
        self.phase = "starting"
        facts: dict[str, Any] = await self._there(self.runner.start, config)
        return facts

    async def configure(self, config: Any) -> None:
        self.phase = "configuring"
        await self._there(self.runner.configure, config)

    async def run(self) -> None:
        await self._there(self.runner.run)
        self.phase = "running"

    def install(self, link: Link) -> None:
        self._post(self.runner.install, link)

    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        end.close()
        raise TypeError(f"{self.spec.name} runs in a thread of the owner; its links are in memory")

    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        self._post(self.runner.lose, link, generation, error)

    def request_stop(self) -> None:
        self._post(self.runner.stop)

    def kill(self) -> None:
        """A thread cannot be killed. It is a daemon: it ends with the process at the latest."""

    def close(self) -> None:
        self._thread.request_stop()
        if self.gone.is_set():
            self._thread.join(1.0)
        else:
            logger.error("thread %s does not react and is abandoned", self._thread.name)

    def _report_broken_there(self, info: LinkInfo, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._report_broken, info, error)

    def _report_end_there(self, error: BaseException | None) -> None:
        self._loop.call_soon_threadsafe(self._report_end, error)

    async def _there(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._loop.result_of(self._thread.call(function, *args))

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(EngineShutdownError):  # the thread has ended: there is nobody to tell
            self._thread.post(function, *args)


def _new_actor(spec: ActorSpec) -> Actor:
    try:
        actor: Actor = load(spec.path)(spec.name, spec.rank)
    except Exception as error:
        raise Failure.of(error).to_start_error(spec.name) from error
    return actor


class RemoteChild(Child):
    """An actor in another process, told of its links over a control socket."""

    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        try:
            self._send(
                "link",
                end.fds,
                info=asdict(info),
                generation=end.generation,
                num_spokes=end.num_spokes,
                index=end.index,
            )
        finally:
            end.close()

    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        self._send("lost", link=link, generation=generation, error=str(error))

    @abstractmethod
    def _send(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """One frame to the other process; nothing happens when it is gone."""


class ProcessChild(RemoteChild):
    """An actor in a process of its own."""

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None], loop: AsyncioLoop) -> None:
        super().__init__(spec, on_end)
        self.pid: int | None = None
        self._loop = loop
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pidfd = -1
        self._stderr: StderrPipe | None = None
        self._reports: dict[str, dict[str, Any]] = {}
        self._reported = anyio.Event()
        self._failure: Failure | None = None
        self._death: ActorDeath | None = None

    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        self._tasks = tasks
        try:
            environment = os.environ | (load(self.spec.environment)(config) if self.spec.environment else {})
            self._exec(environment)
        except Exception as error:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self.close()
            raise Failure.of(error).to_start_error(self.spec.name) from error

    def _exec(self, environment: Mapping[str, str]) -> None:
        if not sys.executable:
            raise EngineStartError("this Python does not know its executable (sys.executable), so it cannot spawn")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self._stderr = StderrPipe(self._loop, read_end)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", child_program.__file__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=write_end,  # what a library prints there must not end up in the output of the user's program
                stderr=write_end,
                env=environment,
                pass_fds=[theirs.fileno()],
                close_fds=True,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(write_end)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.watch(self._pidfd, self._on_exit)
        self._loop.watch(self._control.fileno(), self._on_readable)

    async def start(self, config: Any) -> dict[str, Any]:
        self.phase = "starting"
        self._send(
            "start",
            actor=self.spec.name,
            path=self.spec.path,
            rank=self.spec.rank,
            config_path=path_of(type(config)),
            config=config.to_json().decode(),
            sys_path=list(sys.path),
        )
        facts: dict[str, Any] = (await self._report("started"))["facts"]
        return facts

    async def configure(self, config: Any) -> None:
        self.phase = "configuring"
        self._send("configure", config=config.to_json().decode())
        await self._report("configured")

    async def run(self) -> None:
        self._send("run")
        await self._report("ready")
        self.phase = "running"

    def request_stop(self) -> None:
        self._send("stop")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # knows when the process was reaped: never hits a stranger of the same pid

    def close(self) -> None:
        if self._control is not None:
            self._loop.unwatch(self._control.fileno())
            self._control.close()
            self._control = None
        if self._pidfd >= 0:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._stderr is not None:
            self._stderr.close()

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            "pid": self.pid,
            "num_stderr_bytes_cut": 0 if self._stderr is None else self._stderr.num_cut,
        }

    def _send(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        """To a process that died meanwhile nothing is sent: its pidfd says so next. One that does not read is killed."""
        if self._control is None:
            return
        try:
            send_frame(self._control, op, fds, **fields)
        except (BrokenPipeError, ConnectionResetError):
            return
        except BlockingIOError:
            logger.error("%s does not read its control socket and is killed", self.spec.name)
            self.kill()

    async def _report(self, op: str) -> dict[str, Any]:
        while op not in self._reports:
            if self._death is not None:
                raise self._death.to_start_error()
            if self._failure is not None:
                raise self._failure.to_start_error(self.spec.name)
            await self._reported.wait()
        return self._reports[op]

    def _on_readable(self) -> None:
        while self._control is not None:
            try:
                frame, _ = receive_frame(self._control)
            except BlockingIOError:
                return
            if frame is None:
                self._loop.unwatch(self._control.fileno())  # it exits, or has closed its end: the pidfd knows
                return
            op = frame.pop("op")
            if op == "broken":
                self.on_broken(frame["link"], frame["generation"], frame["error"])
                continue
            if op == "failed":
                self._failure = Failure(**frame)
                self._tasks.start_soon(self._kill_late)
            self._reports[op] = frame
            self._wake()

    def _on_exit(self) -> None:
        """The pidfd is readable: the process is a zombie."""
        assert self._process is not None
        assert self._stderr is not None
        code = self._process.poll()
        if code is None:
            return
        self._on_readable()  # the failure that it reported, if any
        self._stderr.drain()
        self._death = ActorDeath(
            self.spec.name,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            failure=self._failure,
            last_words=self._stderr.last_lines(),
        )
        self.phase = "dead"
        self.close()
        self.gone.set()
        self._wake()
        self._on_end(self, self._death)

    def _wake(self) -> None:
        reported, self._reported = self._reported, anyio.Event()
        reported.set()

    async def _kill_late(self) -> None:
        with anyio.move_on_after(EXIT_GRACE_S):
            await self.gone.wait()
        if not self.gone.is_set():
            logger.error("%s reported a failure and does not exit; it is killed", self.spec.name)
            self.kill()


class StderrPipe:
    """What a process writes to stderr (and stdout): shown on the owner's stderr, the last lines kept.

    Forwarding never blocks the loop: while the owner's stderr takes nothing, up to MAX_STDERR_BACKLOG bytes wait.
    """

    def __init__(self, loop: AsyncioLoop, fd: int) -> None:
        self.num_cut = 0
        """Bytes that were never shown."""
        self._loop = loop
        self._fd = fd
        self._lines: deque[str] = deque(maxlen=MAX_LAST_WORDS)
        self._line = b""
        self._backlog = bytearray()
        self._num_cut_now = 0
        os.set_blocking(fd, False)
        loop.watch(fd, self.drain)

    def drain(self) -> None:
        """Take what is there."""
        for _ in range(64):  # a process that only writes must not hold the loop
            if self._fd < 0:
                return
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self._close_pipe()
                break
            *lines, self._line = (self._line + data).split(b"\n")
            self._line = self._line[:MAX_LINE]
            self._lines.extend(_text(line) for line in lines if line.strip())
            self._backlog += data
        self._forward()

    def last_lines(self) -> tuple[str, ...]:
        rest = (_text(self._line),) if self._line.strip() else ()
        return (*self._lines, *rest)[-MAX_LAST_WORDS:]

    def close(self) -> None:
        self._close_pipe()
        self._forward()
        self.num_cut += len(self._backlog)
        self._backlog.clear()

    def _close_pipe(self) -> None:
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _forward(self) -> None:
        backlog = self._backlog
        try:
            while backlog and _is_writable(2):
                if self._num_cut_now:
                    backlog[:0] = b"[%d bytes of stderr cut]\n" % self._num_cut_now
                    self._num_cut_now = 0
                del backlog[: os.write(2, backlog[: select.PIPE_BUF])]
        except OSError:
            self.num_cut += len(backlog)  # the owner has no stderr
            backlog.clear()
        if len(backlog) > MAX_STDERR_BACKLOG:
            num_cut = len(backlog) - MAX_STDERR_BACKLOG
            del backlog[:num_cut]
            self.num_cut += num_cut
            self._num_cut_now += num_cut
        if backlog and self._fd >= 0:
            self._loop.call_later(0.1, self._forward)


def _text(line: bytes) -> str:
    return line[:MAX_LINE].decode(errors="replace").rstrip()


def _is_writable(fd: int) -> bool:
    """A pipe that is reported writable takes PIPE_BUF bytes without blocking."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))
