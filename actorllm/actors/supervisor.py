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

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from actorllm.actors.actor import Actor
from actorllm.actors.death import ActorDeath
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, AsyncioLoop, current_loop
from actorllm.actors.link import connect_in_memory
from actorllm.actors.placements import Child, LocalChild, OwnerChild, ProcessChild, ThreadChild, new_actor
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology
from actorllm.errors import ActorLLMError, EngineDeadError, EngineShutdownError, EngineStartError
from actorllm.ring.channel import create_link
from actorllm.ring.segment import sweep_stale

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
"""How long the kernel may take to end a killed process."""


class Config(Protocol):
    """What actors are configured with: frozen, and able to travel. `from_json` must be the inverse of `to_json`."""

    def to_json(self) -> bytes: ...

    @classmethod
    def from_json(cls, data: bytes | str) -> Any: ...


Resolve = Callable[[Any, dict[str, dict[str, Any]]], Any]
"""`(config, {actor: facts}) -> config`. What it raises is what the start raises."""


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
            self._actors[spec.name] = new_actor(spec)
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
