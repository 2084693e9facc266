"""`Supervisor`: starts, wires, watches and stops the actors of an engine. Runs on the engine thread as its service.

Owns every child: an actor on this loop, in a thread, or in a process of its own. To a process belong its control socket,
its pidfd and its stderr. The start has phases, each for all actors at once:

    spawn · start(config) → facts · resolve(config, facts) → resolved · configure(resolved) · link · run

Invariants:

- a start that fails, is cancelled or times out leaves nothing behind, and its exception is the child's own;
- processes are spawned from the engine thread only (the parent-death signal follows the thread), by exec;
- the end of a process is seen by its pidfd, that of any other actor by its runner; both become an `ActorDeath`;
- every (re)connection makes new links with the next generation for all their ends (`wiring`);
- after `run` nothing of it exists: no process, zombie, thread, descriptor or shared memory.

With `restarts`, the tree outlives its processes. A dead actor is started again with its group (`ActorSpec.group`). Its
peers get `PeerRestartedError` and then new links. No other process is touched: a scheduler's workers keep their weights.
`restart` counts the deaths in a row and says when to stop. Then, and when an actor in this process dies, the engine ends.
Peers are told, `on_death` is called, and everything is stopped. Callers: the front doors, through EngineThread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from actorllm.actors.actor import Actor, Failure
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, AsyncioLoop, current_loop
from actorllm.actors.shortage import SHORTAGES, shortage_of
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology
from actorllm.clock import now
from actorllm.config import HEARTBEAT_TIMEOUT_S
from actorllm.errors import (
    ActorLLMError,
    EngineDeadError,
    EngineShutdownError,
    EngineStartError,
    PeerRestartedError,
)
from actorllm.ring.segment import sweep_stale
from actorllm.supervision.children import Child, LocalChild, OwnerChild, ProcessChild, ThreadChild, new_actor
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.group import Group, groups_of
from actorllm.supervision.health import ActorHealth, EngineHealth, EngineState
from actorllm.supervision.restart import RestartCounter, RestartLimits
from actorllm.supervision.standby import Standby, StandbyOptions
from actorllm.supervision.watchdog import Watchdog
from actorllm.supervision.wiring import Wiring

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
"""How long the kernel may take to end a killed process, when everything is stopped."""
END_PATIENCE_S = 30.0
"""How long when another one is to take its place: a large process has much to give back."""
MIN_RESTART_TIMEOUT_S = 300.0
"""No process that was started again is stuck before, however quick the first start was."""
RESTART_MULTIPLE = 10.0
"""So many times what the first start took."""

FIRST_SHORTAGE_DELAY_S = 0.02
MAX_SHORTAGE_DELAY_S = 1.0
"""How soon it is tried again, from the first delay to the longest."""
GUEST_PATIENCE_S = 5.0
"""How long a restart waits for the links of attached programs. A program whose link cannot be made by then is dropped."""
SHORTAGE_PATIENCE_S = 60.0
"""A shortage that lasts longer counts as a death before ready."""


class Config(Protocol):
    """What actors are configured with: frozen, and able to travel. `from_json` must be the inverse of `to_json`."""

    def to_json(self) -> bytes: ...

    @classmethod
    def from_json(cls, data: bytes | str) -> Any: ...


ChildMaker = Callable[[ActorSpec, Callable[[Any, ActorDeath], None]], Child]
"""From what it is to be, and what is to hear of its end."""

Resolve = Callable[[Any, dict[str, dict[str, Any]]], Any]
"""`(config, {actor: facts}) -> config`. What it raises is what the start raises."""


class Supervisor:
    """Makes a Topology real and keeps watch over it. Everything but `kill` is called on the engine's loop.

    config: given to every `on_start`. resolve: makes the final configuration from the facts (default: unchanged).
    on_death: hears of the death that ends the engine, before everything is stopped. on_fall: hears the name of a group that died
    and is started again. actors: owner-placed actors that
    exist already, by name. elsewhere: what makes those that no placement makes, by name. check: called before anything is
    started the first time; what it raises ends the start.
    restarts: None: the first death is the end. renew: what the configuration is changed to before
    processes are started once more. amend: what it is changed to after a death. standby: the group for which as many
    processes are kept parked as it has actors, and when. heartbeat_timeout_s, step_timeout_s: when a process that does not go on is
    killed (`watchdog`). restart_timeout_s: when one that was started again and is not ready; None: after many times what the
    first start took. around_start: from the configuration, what surrounds the first start.
    """

    def __init__(
        self,
        topology: Topology,
        config: Config,
        *,
        resolve: Resolve | None = None,
        on_death: Callable[[ActorDeath], None] | None = None,
        on_fall: Callable[[str], None] | None = None,
        actors: Mapping[str, Actor] | None = None,
        elsewhere: Mapping[str, ChildMaker] | None = None,
        start_timeout_s: float | None = None,
        check: Callable[[], None] | None = None,
        restarts: RestartLimits | None = None,
        renew: Callable[[Any], Any] | None = None,
        amend: Callable[[Any, ActorDeath], Any] | None = None,
        standby: StandbyOptions | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        step_timeout_s: float | None = None,
        restart_timeout_s: float | None = None,
        around_start: Callable[[Any], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.topology = topology
        self.config = config
        """The resolved configuration, once the start is through."""
        self.failure: EngineDeadError | None = None
        """Why the engine is dead."""
        self._resolve = resolve
        self._check = check
        self._renew = renew
        self._amend = amend
        self._on_death = on_death
        self._on_fall = on_fall
        self._actors = dict(actors or {})
        self._elsewhere = dict(elsewhere or {})
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._children: dict[str, Child] = {}
        self._watch = Watchdog(self._children, heartbeat_timeout_s, step_timeout_s, self._all_parked)
        self._restart_timeout_s = restart_timeout_s
        self._around_start = around_start
        self._wiring = Wiring(self._children, topology.links)
        self._counter = None if restarts is None else RestartCounter(restarts)
        self._groups = groups_of(topology) if restarts is not None else {}
        self._standby: Standby | None = None
        self._standby_options = standby
        self._standby_group = next((g for g in self._groups.values() if standby and g.name == standby.group), None)
        self._recoveries_s: list[float] = []
        self._last_death: ActorDeath | None = None
        self._tasks: TaskGroup
        self._start_scope: anyio.CancelScope | None = None
        self._start_death: ActorDeath | None = None
        self._phase = "new"
        self._over: anyio.Event | None = None  # made on the loop: the constructor may run under another library
        self._is_stop_requested = False

    def actor(self, name: str) -> Actor:
        """An owner-placed actor. KeyError when it is none."""
        return self._actors[name]

    @property
    def pids(self) -> dict[str, int]:
        """The processes that live, by actor; "parked worker0" is to become it. From any thread."""
        named = {name: child for name, child in list(self._children.items()) if isinstance(child, ProcessChild)}
        named |= self._parked_by_name()
        return {name: child.pid for name, child in named.items() if child.pid is not None and child.is_alive}

    async def run(self, on_ready: Callable[[], object]) -> None:
        """The engine's whole life (see `engine_thread.Service`)."""
        if self._is_stop_requested:
            raise EngineShutdownError("the engine was shut down before it was started")
        over = self._over = anyio.Event()
        failure: Exception | None = None
        async with anyio.create_task_group() as self._tasks:
            try:
                self._tasks.start_soon(self._watch.run)
                began = now()
                with self._around_start(self.config):
                    await self._start()
                self._phase = "running"
                learnt_s = max(MIN_RESTART_TIMEOUT_S, RESTART_MULTIPLE * (now() - began))
                self._watch.start_budget_s = learnt_s if self._restart_timeout_s is None else self._restart_timeout_s
                on_ready()
                if self._standby_group is not None and self._standby_options is not None:
                    self._standby = Standby(self._tasks, self.config, self._standby_options)
                    self._standby.fill(self._standby_group.specs)
                await over.wait()
            except Exception as error:  # raised outside of the group, which would wrap it
                failure = error
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop(is_started=self._phase == "running")
                self._tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def request_stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        self._stop_timeout_s = timeout
        self._is_stop_requested = True
        if self._start_scope is not None:
            self._start_scope.cancel()
        if self._over is not None:
            self._over.set()

    def change_config(self, change: Callable[[Any], Any]) -> None:
        """What is started from now on has the changed configuration; what runs has heard of the change otherwise."""
        self.config = change(self.config)

    def kill(self) -> None:
        for child in (*list(self._children.values()), *self._all_parked()):
            child.kill()

    def admit(self, child: Child, link: LinkSpec) -> None:
        """An actor that runs already joins the tree, by one link. Its end is told by `dismiss`, and is no death.

        Raises EngineShutdownError when the engine does not run, SharedMemoryError or OSError when a link cannot be made.
        """
        if self._phase != "running":
            raise EngineShutdownError(f"the engine is {self._phase}")
        self._children[child.spec.name] = child
        self._watch.wake()
        try:
            self._wiring.add(link)
        except BaseException:
            self.dismiss(child.spec.name, EngineShutdownError("it was not admitted"))
            raise

    def dismiss(self, name: str, error: ActorLLMError) -> None:
        """An admitted actor is gone: its peers lose their links to it. Nothing happens while everything is stopped."""
        if self._phase == "running" and self._children.pop(name, None) is not None:
            self._wiring.forget(name, error)

    def statistics(self) -> dict[str, Any]:
        """Of the tree; that of an actor is its answer to "statistics". From any thread."""
        return {
            "phase": self._phase,
            "actors": {name: child.statistics() for name, child in list(self._children.items())},
            "generations": self._wiring.generations,
            "num_restarts": {group.name: group.num_restarts for group in self._groups.values()},
            "num_parked": 0 if self._standby is None else self._standby.num_parked,
            "parked_memory_bytes": 0 if self._standby is None else self._standby.memory_bytes,
            "num_recoveries": len(self._recoveries_s),
            "recovery_s": sum(self._recoveries_s),
            "max_recovery_s": max(self._recoveries_s, default=0.0),
        }

    def health(self) -> EngineHealth:
        """From any thread, at any time."""
        return EngineHealth(
            self.state,
            {
                name: self._health_of(name, child)
                for name, child in (*list(self._children.items()), *self._parked_by_name().items())
            },
            len(self._recoveries_s),
            sum(self._recoveries_s),
            None if self._last_death is None else str(self._last_death),
        )

    @property
    def state(self) -> EngineState:
        """That of `health`, by itself. From any thread."""
        if self.failure is not None:
            return "dead"
        match self._phase:
            case "new" | "starting" as early:
                return early
            case "stopping" | "stopped":
                return "stopped"
        return "recovering" if any(group.is_restarting for group in self._groups.values()) else "running"

    def _health_of(self, name: str, child: Child) -> ActorHealth:
        group, pid = self._groups.get(name), self.pids.get(name)
        if group is None:
            return ActorHealth(child.phase, pid, 1, None)
        state = "restarting" if group.is_restarting and pid is None else child.phase
        last = group.last_deaths.get(name)
        lives = 1 + group.num_restarts + group.is_restarting
        return ActorHealth(state, pid, lives, None if last is None else str(last))

    # Start

    async def _start(self) -> None:
        """Again from the beginning while a process is killed meanwhile, as long as that may be."""
        self._phase = "starting"
        while not await self._try_start():
            await self._clear_away([child for child in self._children.values() if child.is_process])
            for name in [name for name, child in self._children.items() if child.is_process]:
                del self._children[name]
            if self._renew is not None:
                self.config = self._renew(self.config)

    async def _try_start(self) -> bool:
        """False: a process was killed meanwhile, and it may be tried again."""
        if self._is_stop_requested:  # between two attempts, when there was nothing to cancel
            raise EngineShutdownError("the engine was shut down while it started")
        self._start_death = None
        error: Exception | None = None
        timeout_s = math.inf if self._start_timeout_s is None else self._start_timeout_s
        with anyio.CancelScope() as self._start_scope:  # cancelled by a death or by request_stop
            try:
                with anyio.move_on_after(timeout_s) as in_time:
                    await self._start_phases()
            except Exception as raised:  # the caller that waits for the start is told
                error = raised
        self._start_scope = None
        death = self._start_death
        if death is not None:
            if not self._is_stop_requested and await self._may_try_again(death):
                return False
            raise death.to_start_error() from error
        if error is not None:
            raise error
        if self._is_stop_requested:
            raise EngineShutdownError("the engine was shut down while it started")
        if in_time.cancelled_caught:
            late = [f"{name} ({child.phase})" for name, child in self._children.items() if child.phase != "running"]
            where = await self._where_they_stand()
            raise EngineStartError(
                f"the engine was not ready within {timeout_s:g} s; waiting for {', '.join(late)}; "
                f"start_timeout_s says how long a start may take{where}"
            )
        return True

    async def _where_they_stand(self) -> str:
        """Lines with the stacks of those that a late start waits for. Processes among them are killed."""
        late = [child for child in self._children.values() if child.phase != "running"]
        late = [
            child for child in late if child.phase not in ("started", "configured")
        ] or late  # those wait themselves
        processes = [child for child in late if isinstance(child, ProcessChild) and child.is_alive]
        for child in processes:
            child.kill_stuck("it was not ready")
        with anyio.move_on_after(KILL_TIMEOUT_S):
            for child in processes:
                await child.gone.wait()
        told = [str(child.death) for child in processes if child.death is not None]
        told += [f"{child.spec.name} is in:\n{child.stack()}" for child in late if isinstance(child, ThreadChild)]
        return "".join(f"\n{text}" for text in told)

    async def _may_try_again(self, death: ActorDeath) -> bool:
        """An exception is for the caller; a SIGKILL, from outside or from the kernel for want of memory, may pass."""
        if self._counter is None or death.signal is None or death.failure is not None:
            return False
        delay_s = self._counter.died("start", was_ready=False)
        if delay_s is None:
            return False
        self._last_death = death
        fields = {"event": "early death", "group": "start", "actors": (death.actor,)}
        logger.error("%s while the engine started; it is tried again", death, extra=fields)
        await anyio.sleep(delay_s)
        return True

    async def _start_phases(self) -> None:
        if self._check is not None:
            self._check()
        if any(spec.placement == "process" for spec in self.topology.actors):
            sweep_stale()
        new: list[Child] = []
        for spec in self.topology.actors:
            if spec.name not in self._children:  # those that are there survived the attempt before
                child = self._new_child(spec)
                await child.spawn(self._tasks, self.config)
                self._children[spec.name] = child
                new.append(child)
                self._watch.wake()
        facts = await self._each(new, lambda child: child.start(self.config))
        if self._resolve is not None:
            self.config = self._resolve(self.config, facts)
        children = list(self._children.values())
        await self._each(children, lambda child: child.configure(self.config))
        self._wiring.connect(*self._children)
        await self._each(children, lambda child: child.run())

    def _new_child(self, spec: ActorSpec) -> Child:
        child = self._make_child(spec, current_loop())
        child.on_broken = self._on_broken
        child.on_progress = self._on_progress
        child.on_defect = self._on_defect
        child.on_work = self._watch.wake
        if isinstance(child, OwnerChild):
            child.runner.actor.on_work = self._watch.wake
        return child

    def _all_parked(self) -> tuple[ProcessChild, ...]:
        return () if self._standby is None else self._standby.parked

    def _parked_by_name(self) -> dict[str, ProcessChild]:
        return {f"parked {child.spec.name}": child for child in self._all_parked()}

    def _parked(self, spec: ActorSpec) -> Child | None:
        """A process that is nearly ready to be this actor, if there is one."""
        child = None if self._standby is None else self._standby.take(spec)
        if child is not None:
            child.adopt(spec, self._on_end)
            child.on_broken = self._on_broken
            child.on_progress = self._on_progress
            child.on_defect = self._on_defect
        return child

    def _make_child(self, spec: ActorSpec, loop: AsyncioLoop) -> Child:
        if spec.name in self._elsewhere:
            return self._elsewhere[spec.name](spec, self._on_end)
        if spec.placement == "process":
            return ProcessChild(spec, self._on_end, loop)
        if spec.placement == "thread":
            return ThreadChild(spec, self._on_end, loop)
        if spec.name not in self._actors:
            self._actors[spec.name] = new_actor(spec)
        return OwnerChild(spec, self._on_end, self._actors[spec.name])

    @staticmethod
    async def _each(children: Iterable[Child], step: Callable[[Child], Awaitable[Any]]) -> dict[str, Any]:
        """One phase: all actors at once, the first error ends it."""
        results: dict[str, Any] = {}
        failures: list[Exception] = []

        async def one(child: Child) -> None:
            try:
                results[child.spec.name] = await step(child)
            except Exception as error:
                # Of one actor's start: the first of them ends the others and is raised behind the group.
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for child in children:
                group.start_soon(one, child)
        if failures:
            raise failures[0]
        return results

    # Watch

    def _on_end(self, child: Child, death: ActorDeath) -> None:
        """An actor ended that should not have."""
        if self._phase == "starting":
            if self._start_death is None and self._start_scope is not None:
                self._start_death = death
                self._start_scope.cancel()
            return
        if self._phase != "running" or self._over is None or self._over.is_set():
            if death.exit_code != 0:
                logger.info("while the engine stopped: %s", death)
            return
        group = self._groups.get(child.spec.name)
        if group is None or self._counter is None:
            self._give_up(death)
        elif group.is_restarting:
            group.fell_again(death)  # or was killed with the others
        else:
            self._fall(group, death)

    def _on_broken(self, link: str, generation: int, error: str) -> None:
        """One end found the link corrupt, closed it and goes on: the actors at its other ends have lost it."""
        self._wiring.drop(link, generation, EngineDeadError(f"the link was dropped: {error}"))

    def _on_defect(self, peer: str, link: str, generation: int, what: str) -> None:
        """One end of a link reports a defect of the other one, which is ended, unless it is dead or replaced already."""
        child = self._children.get(peer)
        if child is not None and self._wiring.is_current(link, generation):
            child.end_defective(what)

    def _on_progress(self) -> None:
        if self._counter is not None:
            self._counter.progressed()

    # Restart

    def _fall(self, group: Group, death: ActorDeath) -> None:
        """A running actor died, and its group with it. It is started again, unless that has been in vain too often."""
        assert self._counter is not None
        group.note(death)
        self._last_death = death
        delay_s = self._counter.died(group.name, was_ready=True)
        if delay_s is None:
            self._give_up(death, self._counter.explain(group.name))
            return
        if self._amend is not None:
            try:
                self.config = self._amend(self.config, death)
            except Exception:  # as user code that it looks at may; what died is started all the same
                logger.exception("the configuration is not amended after a death")
        wait = f" in {delay_s:g} s" if delay_s else ""
        logger.error("%s; %s started again%s", death, group, wait, extra=group.log_fields("death"))
        group.is_restarting = True
        group.fell_at = now()
        self._wiring.lose(group.names, PeerRestartedError(str(death)))
        self._tasks.start_soon(self._restart, group, delay_s)
        if self._on_fall is not None:
            self._on_fall(group.name)

    async def _restart(self, group: Group, delay_s: float) -> None:
        try:
            await self._restart_until_it_runs(group, delay_s)
        except Exception as error:  # nothing may be started any more: of the machine, or a defect of this module
            logger.exception("%s not started again", group)
            self._give_up(ActorDeath(group.names[0], failure=Failure.of(error)))

    async def _restart_until_it_runs(self, group: Group, delay_s: float) -> None:
        assert self._counter is not None
        with anyio.CancelScope() as group.restart:  # cancelled by the end of the engine
            while True:
                await self._clear_away([self._children[name] for name in group.names])
                await anyio.sleep(delay_s)
                death = await self._bring_up(group)
                if death is None:
                    break
                self._last_death = death
                self._wiring.lose(group.names, PeerRestartedError(str(death)))
                again_s = self._counter.died(group.name, was_ready=False)
                if again_s is None:
                    self._give_up(death, self._counter.explain(group.name))
                    return
                fields = group.log_fields("early death")
                logger.error("%s before it was ready; %s started again in %g s", death, group, again_s, extra=fields)
                delay_s = again_s
            group.is_restarting = False
            group.num_restarts += 1
            if self._standby is not None and group is self._standby_group:
                self._standby.fill(group.specs)
            took_s = now() - group.fell_at
            self._recoveries_s.append(took_s)
            fields = group.log_fields("restart", seconds=took_s, generations=self._wiring.generations)
            logger.warning("%s running again after %.3f s", group, took_s, extra=fields)

    async def _bring_up(self, group: Group) -> ActorDeath | None:
        """New processes, linked and running. Returns why that failed; what is left of them is gone then.

        A shortage of descriptors, processes or memory may pass: as long as no process dies of it, it is waited for.
        """
        began, delay_s = now(), FIRST_SHORTAGE_DELAY_S
        while True:
            failure, shortage = await self._try_to_bring_up(group)
            if failure is None or shortage is None or now() - began > SHORTAGE_PATIENCE_S:
                if failure is not None:
                    group.note(failure)
                return failure
            fields = group.log_fields("shortage", seconds=now() - began)
            logger.warning("%s not started yet, for want of means: %s", group, shortage, extra=fields)
            await anyio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_SHORTAGE_DELAY_S)

    async def _try_to_bring_up(self, group: Group) -> tuple[ActorDeath | None, OSError | None]:
        """One attempt: why it failed, and the shortage that it failed for, if it was one of this process."""
        failure: ActorDeath | None = None
        shortage: OSError | None = None
        group.death = None
        children: list[Child] = []
        with anyio.CancelScope() as group.attempt:  # cancelled by another death
            try:
                if self._renew is not None and len(group.specs) > 1:
                    self.config = self._renew(self.config)
                for spec in group.specs:
                    child = self._children[spec.name] = self._parked(spec) or self._new_child(spec)
                    children.append(child)
                    if child.phase == "new":
                        await child.spawn(self._tasks, self.config)
                    self._watch.wake()
                await self._each(children, lambda child: child.start(self.config))
                await self._each(children, lambda child: child.configure(self.config))
                await self._link(group)
                await self._each(children, lambda child: child.run())
            except Exception as error:  # whatever ends a start again is a death of the group
                reported = [c for c in children if isinstance(c, ProcessChild) and c.failure is not None]
                failure = ActorDeath(group.names[0], failure=Failure.of(error))
                if reported:
                    failure = ActorDeath(reported[0].spec.name, failure=reported[0].failure)
                else:
                    shortage = shortage_of(error)
        group.attempt = None
        if failure is None and group.death is None:
            return None, None
        await self._clear_away(children)
        return (failure, shortage) if group.death is None else (group.death, None)

    async def _link(self, group: Group) -> None:
        """A shortage of memory or descriptors may pass, and the processes are good: they wait. A guest does not hold up
        all others for ever."""
        began, delay_s = now(), FIRST_SHORTAGE_DELAY_S
        is_late = False
        while True:
            peers = self._wiring.peers_of(group.names)
            guests = [name for name in peers if self._children[name].spec.placement == "attached"]
            is_late |= now() - began > GUEST_PATIENCE_S
            try:
                self._wiring.connect(*group.names, without=guests if is_late else ())
                break
            except OSError as error:
                if error.errno not in SHORTAGES and guests and not is_late:
                    is_late = True  # it may be the link of a guest that cannot be made: they come after the others
                    continue
                if error.errno not in SHORTAGES or now() - began > SHORTAGE_PATIENCE_S:
                    raise
                fields = group.log_fields("shortage", seconds=now() - began)
                logger.warning("%s ready, and cannot be linked yet: %s", group, error, extra=fields)
            await anyio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_SHORTAGE_DELAY_S)
        for guest in guests if is_late else ():
            self._link_guest(guest)

    def _link_guest(self, name: str) -> None:
        try:
            self._wiring.connect(name)
        except OSError as error:
            logger.error("%s is dropped: it cannot be linked: %s", name, error)
            child = self._children[name]
            child.lose("", 0, EngineDeadError(f"there were no means for another link: {error}"))
            child.close()

    @staticmethod
    async def _clear_away(children: list[Child]) -> None:
        """Nothing of these runs any more when it returns. EngineStartError: one cannot be ended (a driver, a dead disk)."""
        for child in children:
            child.kill()
        with anyio.move_on_after(END_PATIENCE_S):
            for child in children:
                await child.gone.wait()
        for child in children:
            if not child.gone.is_set():
                raise EngineStartError(
                    f"{child.spec.name} was killed and has not ended within {END_PATIENCE_S:g} s: none can take its place"
                )
            child.close()

    # Stop

    def _give_up(self, death: ActorDeath, reason: str = "") -> None:
        """The engine ends with this death; reason: why nothing is started again."""
        assert self._over is not None
        if self._over.is_set():
            return
        self._last_death = death
        group = self._groups.get(death.actor)
        fields = {"event": "end", "actors": (death.actor,)} if group is None else group.log_fields("end")
        logger.error("%s%s", death, f"; {reason}, and the engine ends" if reason else "", extra=fields)
        self.failure = death.to_error()
        if reason:
            self.failure.add_note(f"The engine was not restarted: {reason}.")
        try:
            self._wiring.lose(group.names if group is not None else (death.actor,), self.failure)
            if self._on_death is not None:
                self._on_death(death)
        finally:
            self._over.set()

    async def _stop(self, is_started: bool) -> None:
        self._phase = "stopping"
        for group in self._groups.values():
            if group.restart is not None:
                group.restart.cancel()
        parked = [] if self._standby is None else self._standby.close()
        for child in self._children.values():
            if isinstance(child, LocalChild) or (is_started and child.phase == "running"):
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
        processes = [child for child in self._children.values() if isinstance(child, ProcessChild)]
        with anyio.move_on_after(KILL_TIMEOUT_S):
            for child in (*processes, *parked):
                await child.gone.wait()
        for child in (*self._children.values(), *parked):
            child.close()
        self._phase = "stopped"
