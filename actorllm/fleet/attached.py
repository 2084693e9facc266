"""An engine of several replicas that another process owns, joined by this one: `attach` joins either kind of engine.

`FleetAttachClient` has a frontend, and a ring pair, for each replica that runs. A dispatcher of its own routes the requests of
this program. The owner tells of deaths, losses and drains, and this program moves its own streams as the owner moves its. No
token passes through the owner: of a replica on another machine this program calls the agent itself (`nodes.joined_node`).

What the programs have on each replica is on the board that they share (`actors.load_board`), so that each counts the load of all.
The suspects of a death go to the one replica that the owner names.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup

from actorllm.actors.child import error_of_loss
from actorllm.actors.frontend import JournalEntry
from actorllm.actors.load_board import LoadBoard
from actorllm.actors.topology import ActorSpec
from actorllm.attach.client import AttachClient, Met, install_link, lose_links, meet
from actorllm.attach.rendezvous import error_of
from actorllm.client.attached_engine import AttachedEngine
from actorllm.clock import now
from actorllm.errors import (
    ActorLLMError,
    AttachError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineShutdownError,
    PeerRestartedError,
)
from actorllm.fleet.dispatcher import Dispatcher
from actorllm.fleet.nodes.joined_node import JoinedNode
from actorllm.fleet.nodes.stream_link import StreamLink
from actorllm.fleet.replica import AWAY_TIMEOUT_S, ReplicaFrontend, ReplicaState, RoutedReplica, limits_of
from actorllm.fleet.role_memory import LeaseReturns, router_of
from actorllm.scheduling.router import LearntSteps
from actorllm.supervision.children import OwnerChild
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.health import ActorHealth, EngineHealth, EngineState, ReplicaHealth

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a node is called again, or the owner asked for another link; twice as long each time."""
LOSS_GRACE_S = 5.0
"""How long the owner may take to tell of the loss of a replica, behind that of a link (longer than `fleet.SUSPECTS_TIMEOUT_S`)."""


def attach(name: str) -> AttachedEngine:
    """The engine of this name as the front doors of this process use it.

    Raises what `attach.client.meet` does, and AttachError: it has a router of its application that this process cannot make.
    """
    met = meet(name)
    if not met.config.is_fleet:
        return AttachedEngine(AttachClient(met))
    try:
        return AttachedFleetEngine(FleetAttachClient(met))
    except ConfigError as error:
        met.control.close()
        is_missing = isinstance(error.__cause__, ImportError)
        hint = f"; put the module of {met.config.router!r} where this program finds it, as in PYTHONPATH"
        raise AttachError(
            f"engine {name!r} cannot be joined, since each program routes for itself and this one cannot make its router: {error}"
            f"{hint if is_missing else ''}"
        ) from error


class AttachedReplica:
    """A replica of the owner's, from here: a frontend, and its link while the replica runs."""

    def __init__(self, number: int, client: FleetAttachClient) -> None:
        self.number = number
        self.limits = limits_of(client.config, number)
        self.is_draining = False
        self.is_leaving = False
        """Its node is told to end."""
        self.is_removed = False
        self.is_lost = True
        """It has no link, and may get one when it is made anew."""
        self.child: OwnerChild | None = None
        """What runs the frontend, while it is not lost."""
        self.num_lives = 0
        self.last_failure: str | None = None
        self.place: Mapping[str, Any] | None = None
        """On another machine: how its agent is called, while the owner has it there."""
        self.node: JoinedNode | None = None
        self.lost_link = ""
        """The name of the last one that its scheduler has dropped."""
        self.pause_s, self.asked_at = FIRST_PAUSE_S, 0.0
        """Before the owner is asked for another link, and when it last was, in monotonic seconds."""
        self._client = client
        self._find: Callable[[bytes], int] | None = None
        self.frontend = self._new_frontend()

    def _new_frontend(self) -> ReplicaFrontend:
        dispatcher = self._client.dispatcher
        return ReplicaFrontend(
            dispatcher.next_rid,
            self._lose,
            dispatcher.publish,
            partial(dispatcher.hand_off, self.number),
            partial(dispatcher.pause_mode_beside, self.number),
        )

    def _lose(self, entries: dict[int, JournalEntry], error: BaseException) -> None:
        """As of `Replica`: what is pinned waits at the frontend of the next life."""
        pause_mode = self.frontend.pause_mode
        self.frontend = self._new_frontend()
        if pause_mode is not None:
            self.frontend.assume_paused(pause_mode)
        self.is_lost = True
        self.is_leaving = False
        self.last_failure = str(error)
        self._client.dispatcher.forget(self.number)
        self._client.dispatcher.move_lost(self, entries, now(), error)

    def leave_node(self) -> None:
        """It is not there any more."""
        self.place = None
        if self.node is not None:
            self.node.close()

    @property
    def clock_offset_s(self) -> float:
        return 0.0 if self.node is None else self.node.clock_offset_s

    def load(self) -> tuple[int, LearntSteps] | None:
        board = self._client.board
        return None if board is None else board.read(self.number)

    @property
    def find(self) -> Callable[[bytes], int] | None:
        board = self._client.board
        if self._find is None and board is not None:
            self._find = board.hashes(self.number).find
        return self._find

    @property
    def takes_requests(self) -> bool:
        return not (self.is_draining or self.is_leaving or self.is_removed or self.is_lost)

    @property
    def state(self) -> ReplicaState:
        if self.is_lost:
            return "lost"
        if self.is_draining or self.is_leaving:
            return "draining"
        return "running" if self.frontend.is_linked else "recovering"

    def health(self) -> ReplicaHealth:
        """What this process sees of it. From any thread."""
        return ReplicaHealth(
            number=self.number,
            state=self.state,
            pids={},
            num_requests=self.frontend.num_open,
            num_lives=self.num_lives,
            num_recoveries=self.frontend.num_recoveries,
            recovery_s=self.frontend.max_recovery_s,
            last_failure=self.last_failure,
        )


class FleetAttachClient(AttachClient):
    """See the module docstring."""

    def __init__(self, met: Met) -> None:
        super().__init__(met)
        self.replicas: dict[int, AttachedReplica] = {}
        """By number, those that were stopped for good left out."""
        self.board: LoadBoard | None = None
        replicas = cast(dict[int, RoutedReplica], self.replicas)
        self._return_lease = LeaseReturns(self.config)
        self.dispatcher = Dispatcher(
            replicas, router_of(self.config), return_lease=self._return_lease, num_ranks=self.config.world_size
        )
        self._tasks: TaskGroup
        self._frames: deque[tuple[dict[str, Any], tuple[int, ...]]] = deque()
        self._has_frames: anyio.Event
        self._has_called: anyio.Event
        self._children: set[OwnerChild] = set()
        self._calling: set[int] = set()
        """Replicas of other machines whose agents were not reached yet, and have not failed to answer."""

    # The frontends

    async def _start_frontends(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._has_frames, self._has_called = anyio.Event(), anyio.Event()
        tasks.start_soon(self._follow)

    async def _run_frontends(self) -> None:
        """Each runs since its replica was first heard of."""

    async def _stop_frontends(self) -> None:
        self._drop_frames()
        for replica in self.replicas.values():
            replica.leave_node()
        children = list(self._children)
        for child in children:
            child.request_stop()
        for child in children:
            await child.gone.wait()
        self.dispatcher.fail_all(EngineShutdownError("the engine was shut down"))  # what waited for a lost replica
        self._return_lease.close()

    def _fail_frontends(self, error: EngineError) -> None:
        self._drop_frames()
        self.dispatcher.fail_all(error)
        for replica in self.replicas.values():
            if replica.child is not None:
                lose_links(replica.frontend, replica.child, error)

    def _drop_frames(self) -> None:
        while self._frames:
            for fd in self._frames.popleft()[1]:
                os.close(fd)

    # What the owner says

    def _obey(self, frame: dict[str, Any], fds: tuple[int, ...]) -> None:
        match frame["op"]:
            case "joined":
                if fds:
                    self._share_board(fds, frame["number"])
                self._frames.append((frame, ()))
            case "link" | "remote" | "lost" | "fell" | "gone" | "draining" | "removed":
                self._frames.append((frame, fds))
            case _:
                super()._obey(frame, fds)
                return
        self._has_frames.set()

    def _share_board(self, fds: tuple[int, ...], program: int) -> None:
        try:
            self.board = LoadBoard(f"/proc/self/fd/{fds[0]}")
        finally:
            for fd in fds:
                os.close(fd)
        self.dispatcher.share(self.board, program)

    async def _follow(self) -> None:
        """One frame after the other: some take a few turns of the loop."""
        while True:
            while self._frames:
                frame, fds = self._frames.popleft()
                try:
                    await self._do(frame, fds)
                except (ActorLLMError, OSError) as error:  # no memory or descriptor left for the rings
                    self._end(EngineDeadError(f"engine {self.name!r} cannot be joined: {error}"))
            await self._has_frames.wait()
            self._has_frames = anyio.Event()

    async def _do(self, frame: dict[str, Any], fds: tuple[int, ...]) -> None:
        if frame["op"] == "joined":
            self._tasks.start_soon(self._note_when_reached, frame)
            return
        number = frame["replica"]
        replica = self.replicas.get(number)
        if replica is None and frame["op"] in ("link", "remote"):
            replica = self.replicas[number] = AttachedReplica(number, self)
            replica.frontend.assume_paused(self.dispatcher.pause_mode)
        if replica is None:
            return
        if frame["op"] == "link":
            try:
                child = await self._child_of(replica)
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
            install_link(child, frame, fds)
            self.dispatcher.end_wait(replica)
            return
        match frame["op"]:
            case "remote":
                replica.leave_node()
                replica.place = frame["place"]
                self._calling.add(number)
                self._tasks.start_soon(self._live_on_node, replica, frame["place"])
            case "lost":
                self._note_lost_link(replica, frame)
            case "fell":
                self.dispatcher.forget(number)
                self.dispatcher.set_trial(frame["trial"])
                self.dispatcher.move_to_trial(replica, frame["group"], now())
            case "gone":
                self.dispatcher.set_trial(frame["trial"])
                self.dispatcher.waits = self.dispatcher.waits or frame["waits"]  # until one is linked
                replica.leave_node()
                self._lose(replica, error_of(frame))
            case "draining":
                replica.is_draining = frame["is_draining"]
                if replica.is_draining and self.dispatcher.can_move(replica):
                    self.dispatcher.move(replica, lost_at=None)
                elif replica.frontend.is_linked:
                    self.dispatcher.end_wait(replica)
            case "removed":
                self._remove(replica)

    async def _note_when_reached(self, frame: dict[str, Any]) -> None:
        """The engine is joined when there is a link to each replica, those left out that do not answer."""
        while self._calling:
            self._has_called = anyio.Event()
            await self._has_called.wait()
        self._note_joined(frame)

    def _note_called(self, number: int) -> None:
        self._calling.discard(number)
        self._has_called.set()

    async def _live_on_node(self, replica: AttachedReplica, place: Mapping[str, Any]) -> None:
        """A stream to its agent, and another one if that breaks, as long as the owner has it there."""
        pause_s, lost_at = FIRST_PAUSE_S, now()
        while replica.place is place:
            child: OwnerChild | None = None

            def on_link(link: StreamLink) -> None:
                if child is not None:  # noqa: B023 - this turn of the loop is over when another one begins
                    child.install(link)  # noqa: B023

            lost, leaving = partial(self._note_lost_link, replica), partial(self._leave_replica, replica)
            node = replica.node = JoinedNode(place, on_link, lost, leaving)
            try:
                await node.join()
                if replica.place is place:
                    child = await self._child_of(replica)
                    child.install(node.link)
                    self.dispatcher.end_wait(replica)
                    pause_s = FIRST_PAUSE_S
                self._note_called(replica.number)
                error = await node.wait_ended()
            except ActorLLMError as failure:
                error = failure
            finally:
                node.close()
                self._note_called(replica.number)
            if replica.place is place and not replica.is_lost:
                # The node has died, or this stream alone: the owner knows, and tells where suspects are tried.
                replica.is_lost, lost_at = True, now()
                if not any(one.takes_requests for one in self.replicas.values()):
                    self.dispatcher.waits = True
                await anyio.sleep(place["timeout_s"] + 1.0)
                if replica.place is place:
                    self._lose(replica, error)
            if replica.place is place:
                if (
                    self.dispatcher.waits and now() - lost_at > AWAY_TIMEOUT_S
                ):  # the owner reaches it, and this program does not
                    self.dispatcher.give_up_wait(error)
                logger.warning("replica %d is called again in %g s: %s", replica.number, pause_s, error)
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _leave_replica(self, replica: AttachedReplica) -> None:
        """Its node ends: what this program has there goes on elsewhere, and nothing of it is suspected."""
        replica.is_leaving = True
        if self.dispatcher.can_move(replica):
            self.dispatcher.move(replica, lost_at=None)

    async def _child_of(self, replica: AttachedReplica) -> OwnerChild:
        """What runs its frontend; started if it was lost."""
        if replica.child is None:
            spec = ActorSpec(f"frontend{replica.number}", "", placement="owner")
            child = replica.child = OwnerChild(spec, self._on_frontend_end, replica.frontend)
            self._children.add(child)
            await child.spawn(self._tasks, self.config)
            await child.start(self.config)
            await child.run()
            replica.num_lives += 1
        replica.is_lost = False
        return replica.child

    def _note_lost_link(self, replica: AttachedReplica, frame: dict[str, Any]) -> None:
        loss = error_of_loss(frame)
        if isinstance(loss, PeerRestartedError) and replica.child is not None:
            replica.child.lose(frame["link"], frame["generation"], loss)
        else:
            replica.is_lost, replica.lost_link = True, frame["link"]  # the owner says where its streams go
            self._tasks.start_soon(self._lose_unless_told, replica, replica.frontend, loss)

    async def _lose_unless_told(self, replica: AttachedReplica, frontend: ReplicaFrontend, loss: ActorLLMError) -> None:
        """Of a link alone, which its scheduler has dropped, the owner tells nothing more: the replica lives."""
        await anyio.sleep(LOSS_GRACE_S)
        if replica.is_lost and replica.frontend is frontend and not replica.is_removed:
            self._lose(replica, loss)
            if replica.node is not None:
                replica.node.close()  # it is called again
            else:
                await self._ask_for_link(replica, replica.frontend)

    async def _ask_for_link(self, replica: AttachedReplica, frontend: ReplicaFrontend) -> None:
        """The scheduler goes on, so the owner can make one more. It is asked until there is one, or the owner tells of an end."""
        if now() - replica.asked_at > LONGEST_PAUSE_S:
            replica.pause_s = FIRST_PAUSE_S  # the last one has held
        while True:
            await anyio.sleep(replica.pause_s)
            if not replica.is_lost or replica.frontend is not frontend or replica.is_removed:
                return
            replica.pause_s, replica.asked_at = min(2 * replica.pause_s, LONGEST_PAUSE_S), now()
            self._send("relink", replica=replica.number, link=replica.lost_link)

    def _lose(self, replica: AttachedReplica, error: ActorLLMError) -> None:
        """It is gone for good; what it had goes on elsewhere."""
        known = error if isinstance(error, EngineError) else EngineDeadError(str(error))
        frontend, child = replica.frontend, replica.child
        if child is not None:
            lose_links(frontend, child, known)
        frontend.fail_all(known)
        self._let_go(replica)

    def _remove(self, replica: AttachedReplica) -> None:
        """It is stopped, and does not come back."""
        replica.is_removed = True
        replica.leave_node()
        if self.dispatcher.can_move(replica):
            self.dispatcher.move(replica, lost_at=None)
        self.dispatcher.move_rest(replica)
        del self.replicas[replica.number]
        self._let_go(replica)

    def _let_go(self, replica: AttachedReplica) -> None:
        child, replica.child = replica.child, None
        if child is None:
            return

        async def end() -> None:
            child.request_stop()
            await child.gone.wait()
            self._children.discard(child)

        self._tasks.start_soon(end)

    def _on_frontend_end(self, child: Any, death: ActorDeath) -> None:
        if any(replica.child is child for replica in self.replicas.values()):
            super()._on_frontend_end(child, death)

    # What is known of them

    def health(self) -> EngineHealth:
        """Of what this process sees: its own frontends, and which replicas there are."""
        replicas = [replica.health() for replica in list(self.replicas.values())]
        state: EngineState = "new"
        if self._error is not None:
            state = "dead" if isinstance(self._error, EngineDeadError) else "stopped"
        elif self._is_joined:
            state = "running" if any(one.state in ("running", "draining") for one in replicas) else "recovering"
        actors = {
            f"replica{one.number}/frontend": ActorHealth(one.state, None, 1, one.last_failure) for one in replicas
        }
        num_recoveries = sum(one.num_recoveries for one in replicas)
        recovery_s = sum(one.recovery_s for one in replicas)
        last_failure = None if self._error is None else str(self._error)
        return EngineHealth(state, actors, num_recoveries, recovery_s, last_failure, replicas=replicas)


class AttachedFleetEngine(AttachedEngine):
    """See the module docstring."""

    def __init__(self, membership: FleetAttachClient) -> None:
        self._fleet = membership
        super().__init__(membership)

    def _make(self) -> None:
        super()._make()
        self._frontend = self._fleet.dispatcher

    @property
    def replica_numbers(self) -> list[int]:
        return sorted(self._fleet.replicas) or list(range(self.config.data_parallel_size))  # it is joined later

    def look(self, after: Mapping[int, int], at_most: int) -> Future[Any]:
        return self.ask_scheduler("live", after=dict(after), at_most=at_most)

    def drain_replica(self, number: int, is_draining: bool = True) -> Future[None]:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can drain a replica of it")
