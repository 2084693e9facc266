"""`Fleet`: the replicas of an engine, their starts, their losses and their number. The service of the engine's thread.

Each replica has a supervisor of its own, with its own restarts. The fleet starts all at once, is ready when `ready_replicas`
are, and lets the others start behind. What happens to a replica:

- a process of it dies and is started again: its streams move at once, if that is sooner than waiting for it;
- its supervisor gives it up (*lost*): its streams move, and it is made anew after a pause that grows;
- it is drained or stopped by the caller: its streams move, and nothing of them is suspected.

The engine ends with the error of the last replica that is lost while no other one runs or starts. The machine of the last one
that ran may have fallen silent, or have been told to end. Then everything waits up to `AWAY_TIMEOUT_S` for one that comes back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
from anyio import to_thread
from anyio.abc import TaskGroup

from actorllm.actors.engine_thread import STOP_TIMEOUT_S
from actorllm.actors.frontend import JournalEntry, OutputObserver
from actorllm.actors.load_board import LoadBoard
from actorllm.actors.memory_file import MemoryFile
from actorllm.attach.server import AttachServer
from actorllm.clock import now
from actorllm.config import RAY, EngineConfig
from actorllm.errors import (
    ActorLLMError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineShutdownError,
    InvalidParameterError,
    shown,
)
from actorllm.fleet.dispatcher import Dispatcher
from actorllm.fleet.nodes.ray_cluster import RayPlacement
from actorllm.fleet.nodes.remote import RemoteReplica
from actorllm.fleet.replica import AWAY_TIMEOUT_S, Replica, ReplicaEvents, replica_config
from actorllm.fleet.role_memory import LeaseReturns, RoleMemory, router_of
from actorllm.fleet.route_record import RecordedRouter
from actorllm.fleet.scaling import DemandScaling
from actorllm.model.threads import num_threads
from actorllm.scheduling.router import MAX_REPLICAS
from actorllm.supervision.health import EngineHealth, EngineState
from actorllm.supervision.supervisor import Supervisor

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a lost replica is made anew; twice as long each time, until it has been ready."""

AWAY_PAUSE_S = 2.0
"""How often the machines of replicas are called at least while all are away."""
RELEASE_TIMEOUT_S = 30.0
"""For Ray to give back where a removed replica ran."""
SUSPECTS_TIMEOUT_S = 3.0
"""How long programs wait at most, after a death, for the scheduler that is to take their suspects."""


def check_num_replicas(num_replicas: object) -> None:
    """Raises InvalidParameterError."""
    if isinstance(num_replicas, bool) or not isinstance(num_replicas, int) or not 1 <= num_replicas <= MAX_REPLICAS:
        raise InvalidParameterError(f"num_replicas={shown(num_replicas)} must be from 1 to {MAX_REPLICAS}")


def _with_share(config: EngineConfig, share: float | None) -> EngineConfig:
    return replace(config, cpu_share=share)


class Fleet:
    """See the module docstring. Everything but `kill`, `pids`, `health` and `statistics` is called on the engine's loop.

    config: of the whole engine. last_rid: of the fleet whose place it takes. on_end: hears why the engine is dead.
    is_first_held: replica 0 is not started before `start_first`.
    """

    def __init__(
        self,
        config: EngineConfig,
        last_rid: int,
        on_end: Callable[[EngineError], None],
        *,
        is_first_held: bool = False,
    ) -> None:
        self.config = config
        """Resolved once a replica is ready: with its number of blocks."""
        self.failure: EngineError | None = None
        self._given = config
        self._is_first_held = is_first_held
        self._placement = RayPlacement(config) if RAY in config.nodes else None
        self._board_file = MemoryFile("loads", LoadBoard.NUM_BYTES)
        self._board = LoadBoard(self._board_file.path)
        self._on_end = on_end
        self._replicas: dict[int, Replica] = {}
        self._memory = RoleMemory(config) if config.roles else None
        if self._memory is not None:
            self._given = self._memory.shared_by(config)
        self._return_lease = LeaseReturns(self._given)
        self.dispatcher = Dispatcher(
            self._replicas,
            router_of(config),
            last_rid,
            self._board,
            return_lease=self._return_lease,
            num_ranks=config.world_size,
        )
        self.attached: AttachServer | None = None
        """The door for other programs, if the engine has a name."""
        self._recorded: RecordedRouter | None = None
        self._observer_of: Callable[[int], OutputObserver] | None = None
        self._num_wanted = config.data_parallel_size
        self._num_divided = max(config.data_parallel_size, config.max_replicas)
        self._scaling: DemandScaling | None = None
        if config.max_replicas:
            self._scaling = DemandScaling(config, self.dispatcher, self._replicas, self._resize_for_demand)
        self._resizing: anyio.Lock  # made on the loop
        for _ in range(config.data_parallel_size):
            self._add()
        self._tasks: TaskGroup | None = None
        self._over: anyio.Event | None = None
        self._is_ready: anyio.Event  # both are made on the loop
        self._on_ready: Callable[[], object] | None = None
        self._first_error: Exception | None = None
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._is_stop_requested = False
        self._arithmetic: tuple[int, str] | None = None
        """Of the first replica that told, and its number."""
        self._away_until: float | None = None
        """While the engine waits for machines that are away, when it ends; in monotonic seconds."""
        self._start_s: dict[int, float] = {}
        """What the last start of each took."""

    @property
    def board(self) -> tuple[LoadBoard, MemoryFile]:
        """What routers are told, and its file."""
        return self._board, self._board_file

    def running(self) -> dict[int, Supervisor]:
        """The supervisors of the replicas that programs can join now, by number."""
        return {
            number: replica.supervisor
            for number, replica in self._replicas.items()
            if isinstance(replica.supervisor, Supervisor)
            and replica.supervisor.state in ("running", "recovering")
            and not replica.is_removed
        }

    def places(self) -> dict[int, dict[str, Any]]:
        """Where the replicas of other machines are that programs can join now, by number."""
        remote = {n: one.supervisor for n, one in self._replicas.items() if not one.is_removed}
        return {
            number: place
            for number, one in remote.items()
            if isinstance(one, RemoteReplica) and (place := one.place) is not None
        }

    def draining(self) -> list[int]:
        """The numbers of replicas that take no new requests."""
        return [number for number, one in sorted(self._replicas.items()) if one.is_draining and not one.is_removed]

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """By number, those that were stopped for good left out."""
        return self._replicas

    def observe(self, observer_of: Callable[[int], OutputObserver]) -> None:
        """Let the outputs of each replica be looked at, of those to come as well; by its number."""
        self._observer_of = observer_of
        for replica in self._replicas.values():
            replica.observe(observer_of(replica.number))

    def _add(self) -> Replica:
        number = next(n for n in range(len(self._replicas) + 1) if n not in self._replicas)
        config = replica_config(self._given, number, self._num_divided, self._board_file.path)
        if self._num_divided > self._num_wanted and self._given.num_threads is None:  # memory alone is kept for more
            config = _with_share(config, replica_config(self._given, number, self._num_wanted, "").cpu_share)
        replica = Replica(
            number,
            config,
            self.dispatcher.next_rid,
            self._on_lost,
            self._on_fall,
            self._board,
            self.dispatcher.publish,
            self._on_leaving,
            self._check_arithmetic,
            None if self._placement is None else self._placement.locate,
            self.dispatcher.hand_off,
            self.dispatcher.pause_mode_beside,
        )
        replica.frontend.assume_paused(self.dispatcher.pause_mode)
        if self._observer_of is not None:
            replica.observe(self._observer_of(number))
        self._replicas[number] = replica
        return replica

    # The service of the engine's thread

    async def run(self, on_ready: Callable[[], object]) -> None:
        """The engine's whole life (see `engine_thread.Service`)."""
        if self._is_stop_requested:
            raise EngineShutdownError("the engine was shut down before it was started")
        if self._given.record is not None:
            self._recorded = RecordedRouter(self.dispatcher.router, self._given.router, self._given.record)
            self.dispatcher.router = self._recorded
        self._over, self._is_ready, self._on_ready = anyio.Event(), anyio.Event(), on_ready
        self._resizing = anyio.Lock()
        async with anyio.create_task_group() as self._tasks:
            for replica in list(self._replicas.values())[self._is_first_held :]:
                self._spawn(replica)
            if self._scaling is not None:
                self._tasks.start_soon(self._scale_by_demand, self._scaling)
            await self._over.wait()
            self._is_ready.set()
            if self._scaling is not None:
                self._scaling.stop()
            for replica in self._replicas.values():
                replica.request_stop(self._stop_timeout_s)
        self.dispatcher.fail_all(EngineShutdownError("the engine was shut down"))  # what waited for a next life
        self._board_file.close()
        self._return_lease.close()
        if self._memory is not None:
            self._memory.close()
        if self._placement is not None:
            # Without its head Ray answers late or never; its agents end with this process at the latest.
            with anyio.move_on_after(self._stop_timeout_s, shield=True):
                await to_thread.run_sync(self._placement.close, abandon_on_cancel=True)
        if self._recorded is not None:
            self._recorded.close()
        if self._on_ready is not None:
            if self._is_stop_requested:
                raise EngineShutdownError("the engine was shut down while it started")
            raise self._first_error or EngineShutdownError("the engine was shut down while it started")

    def request_stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        self._is_stop_requested = True
        self._stop_timeout_s = timeout
        if self._over is not None:
            self._over.set()

    def kill(self) -> None:
        self._is_stop_requested = True
        for replica in list(self._replicas.values()):
            replica.supervisor.kill()

    @property
    def _is_over(self) -> bool:
        return self._over is None or self._over.is_set()

    def _spawn(self, replica: Replica) -> None:
        assert self._tasks is not None
        events = replica.events = ReplicaEvents()

        async def live() -> None:
            try:
                await self._live(replica, events)
            finally:
                events.is_settled.set()
                events.has_ended.set()

        self._tasks.start_soon(live)

    async def _live(self, replica: Replica, events: ReplicaEvents) -> None:
        """The lives of a replica, one after the other."""
        pause_s = FIRST_PAUSE_S
        while True:
            began, frontend = now(), replica.frontend

            def ready(began: float = began) -> None:
                nonlocal pause_s
                pause_s = FIRST_PAUSE_S
                replica.has_run = True
                self._start_s[replica.number] = now() - began
                self._away_until = None
                self.dispatcher.end_wait(replica)
                events.is_settled.set()
                self._note_ready(replica)
                if self.attached is not None and isinstance(replica.supervisor, Supervisor):
                    self.attached.admit_all(replica.number, replica.supervisor)
                elif self.attached is not None and (place := self.places().get(replica.number)) is not None:
                    self.attached.tell("remote", replica=replica.number, place=place)
                if self.attached is not None and replica.is_draining:  # of programs that joined while it was lost
                    self.attached.tell("draining", replica=replica.number, is_draining=True)

            error: Exception | None = None
            try:
                await replica.supervisor.run(ready)
            except Exception as raised:  # of its start: it is tried again, or the waiting caller is told
                error = raised
            replica.release()
            if replica.is_removed or self._is_over:
                return
            error = error or replica.supervisor.failure or EngineDeadError(f"replica {replica.number} ended")
            if isinstance(
                error, EngineShutdownError
            ):  # of its node alone: to the frontend it would be the end of the engine
                error = EngineDeadError(str(error))
            replica.last_failure = f"{type(error).__name__}: {error}"
            replica.is_lost = True
            events.is_settled.set()
            frontend.fail_all(error)  # a replica that never ran has told of nothing
            if self._ends_with(replica, error):
                return
            await self._is_ready.wait()  # a start that fails is told; trying on would hide it behind the next one
            if self._is_over:
                return
            logger.error("replica %d is lost and made anew in %g s: %s", replica.number, pause_s, error)
            replica.renew()
            replica.is_lost = True  # until it starts
            with anyio.move_on_after(pause_s):
                await events.ends_pause.wait()
            is_awaited = self._away_until is not None and now() < self._away_until
            pause_s = min(2 * pause_s, AWAY_PAUSE_S if is_awaited else LONGEST_PAUSE_S)
            if replica.is_removed or self._is_over:
                return
            events.ends_pause = anyio.Event()
            replica.is_lost = False

    def _note_ready(self, replica: Replica) -> None:
        num_ready = sum(one.supervisor.state in ("running", "recovering") for one in self._replicas.values())
        if self._on_ready is None or num_ready < min(self.config.ready_replicas, self._num_wanted):
            return
        self.config = self._given.resolved(replica.num_blocks)
        self._is_ready.set()
        on_ready, self._on_ready = self._on_ready, None
        on_ready()

    def _ends_with(self, replica: Replica, error: Exception) -> bool:
        """Whether the engine ends with the loss of this one: there is no other, or as many have failed to start."""
        if self._first_error is None:
            self._first_error = error
        others = [
            one for one in self._replicas.values() if one is not replica and not one.is_lost and one.events is not None
        ]
        is_last = not any(one.state != "lost" for one in others)
        if self._on_ready is not None:
            is_last = len(others) < min(self.config.ready_replicas, self._num_wanted)
        if not is_last or self._waits_for(replica):
            return False
        if self._on_ready is None:
            self._end(error)
        assert self._over is not None
        self._over.set()
        return True

    def _end(self, error: Exception) -> None:
        if self.failure is not None:  # the first one is the cause
            return
        self.failure = error if isinstance(error, EngineError) else EngineDeadError(str(error))
        self._on_end(self.failure)

    # Losses

    def _waits_for(self, replica: Replica) -> bool:
        """Whether the engine goes on though no replica runs. This one is lost, or has failed to start.

        One that starts meanwhile may run in a moment, or fail. So the time begins without regard to it, and ends behind its start.
        """
        if self._given.on_failure == "raise" or self._on_ready is not None or self._is_stop_requested:
            return False
        states = {one.state for one in self._replicas.values()}
        if states & {"running", "draining", "recovering"}:
            return False
        if self._away_until is None and replica.has_run and replica.is_away:
            self._away_until = now() + AWAY_TIMEOUT_S
            logger.error("no replica runs; machines that are away are waited for, up to %g s", AWAY_TIMEOUT_S)
            for one in self._replicas.values():  # a long pause may have begun before, and its machine be back by now
                if one is not replica and one.is_lost and one.events is not None:
                    one.events.ends_pause.set()
        has_time = bool(states & {"new", "starting"}) or (self._away_until is not None and now() < self._away_until)
        self.dispatcher.waits = self._away_until is not None and has_time
        return self.dispatcher.waits

    def _on_lost(self, replica: Replica, entries: dict[int, JournalEntry], error: BaseException) -> None:
        """On the way to the end of its supervisor: what it had goes on elsewhere."""
        replica.is_lost = True
        self.dispatcher.forget(replica.number)
        trial = self.dispatcher.choose_trial(replica)
        is_alone = all(one.state == "lost" for one in self._replicas.values())
        waits = self._waits_for(replica)
        if is_alone and not waits and self._away_until is not None:
            error = EngineDeadError(f"no replica came back within {AWAY_TIMEOUT_S:g} s; the last one: {error}")
        self.dispatcher.move_lost(replica, entries, now(), error, has_run=replica.has_run)
        if self._tasks is not None and not self._is_over:
            fields = {
                "replica": replica.number,
                "type_name": type(error).__name__,
                "message": str(error),
                "waits": waits,
            }
            self._tasks.start_soon(partial(self._tell_attached, trial, "gone", **fields))
        # One that never ran has lost nothing: its start is tried again, whatever a death is the end of.
        is_fatal = self._given.on_failure == "raise" and replica.has_run
        ends = is_fatal or (is_alone and not waits)
        if ends and self._on_ready is None and not self._is_over and isinstance(error, Exception):
            self._end(error)  # at once: callers must not wait for the end of its processes
            assert self._over is not None
            self._over.set()

    def _on_fall(self, replica: Replica, group: str) -> None:
        """A process of a replica died, and is started again."""
        self.dispatcher.forget(replica.number)
        if group == "scheduler":
            self._board.hashes(replica.number).end()
        if self._tasks is not None and self._on_ready is None and not self._is_over:
            self._tasks.start_soon(self._tell_fall, replica, group, now())

    async def _tell_fall(self, replica: Replica, group: str, fell_at: float) -> None:
        """Its streams may go on elsewhere: those of this program, and those of programs that have joined."""
        await anyio.lowlevel.checkpoint()  # the supervisor tells of the death first
        if replica.is_lost or self._is_over:
            return
        restart_s = replica.expected_restart_s(self._start_s.get(replica.number, 0.0))
        trial = self.dispatcher.trial_after_fall(replica, restart_s)
        self.dispatcher.move_to_trial(replica, group, fell_at)
        await self._tell_attached(trial, "fell", replica=replica.number, group=group)

    async def _tell_attached(self, trial: int | None, op: str, **fields: Any) -> None:
        """To programs that have joined, after the scheduler that is to take their suspects knows that these come."""
        if self.attached is None or not self.attached.num_attached:
            return
        if trial is not None and trial in self._replicas and trial != fields["replica"]:
            with contextlib.suppress(ActorLLMError), anyio.move_on_after(SUSPECTS_TIMEOUT_S):
                await self._replicas[trial].frontend.ask_scheduler("expect_suspects")
        self.attached.tell(op, trial=trial, **fields)

    def _on_leaving(self, replica: Replica) -> None:
        """Its node is told to end; what it has goes on elsewhere, if there is an elsewhere."""
        if self.dispatcher.can_move(replica):
            self.dispatcher.move(replica, lost_at=None)

    def _check_arithmetic(self, replica: Replica, facts: Mapping[str, Any]) -> None:
        """A stream that moves keeps its tokens between replicas that compute alike. Raises ConfigError: this one does not."""
        found = facts.get("arithmetic")
        if found is None:
            return
        if self._arithmetic is None:
            self._arithmetic = replica.number, found
        number, known = self._arithmetic
        if found != known:
            raise ConfigError(
                f"replica {replica.number}{f' on node {replica.config.node}' if replica.is_remote else ''} computes with {found}, "
                f"and replica {number} with {known}: streams that move between them would change; use machines and versions of "
                f"one kind"
            )
        scheme = facts.get("scheme")
        if scheme is not None and self._given.model.scheme is None:  # those to come, and lives to come, take it as well
            self.change_config(lambda config: replace(config, model=replace(config.model, scheme=scheme)))

    # Controls

    async def scale(self, num_replicas: int) -> None:
        """Have so many replicas. New ones start; those with the highest numbers are stopped, and their streams move.

        Returns when the new ones are ready and the others have ended. Raises InvalidParameterError, EngineStartError.
        """
        check_num_replicas(num_replicas)
        if self._memory is not None:
            raise InvalidParameterError(
                f"num_replicas={num_replicas!r}: the replicas of this engine have roles, {len(self._given.roles)} in all; build "
                f"another engine"
            )
        if self._scaling is not None:
            least, most = self._given.min_replicas, self._given.max_replicas
            if not least <= num_replicas <= most:
                raise InvalidParameterError(
                    f"num_replicas={num_replicas} must be from min_replicas={least} to max_replicas={most} of this engine"
                )
            self._scaling.autoscaler.set_wanted(num_replicas, now())
        await self._ask_for_room(num_replicas)
        for replica in await self._resize(num_replicas):
            await self._settled(replica)

    async def _resize(self, num_replicas: int) -> list[Replica]:
        """As `scale`, without waiting for those that start: they are returned."""
        if self._tasks is None or self._is_over:
            raise EngineShutdownError("the engine is not running")
        async with self._resizing:
            if self._is_over:  # by now: one that starts would not be stopped
                raise EngineShutdownError("the engine was shut down")
            self._num_wanted = num_replicas
            self._num_divided = max(self._num_divided, num_replicas)
            added = []
            while len(self._replicas) < num_replicas:
                added.append(self._add())
                self._spawn(added[-1])
            with anyio.CancelScope(shield=True):  # a caller that waits no more leaves no replica half removed
                for number in sorted(self._replicas)[num_replicas:]:
                    await self._remove(self._replicas[number])
            await self._divide_cores(num_replicas)
        return added

    async def _ask_for_room(self, num_replicas: int) -> None:
        """Of Ray, whose autoscaler adds nodes and takes them away."""
        if self._placement is not None:
            await to_thread.run_sync(self._placement.want, num_replicas, abandon_on_cancel=True)

    async def _resize_for_demand(self, num_replicas: int) -> None:
        await self._ask_for_room(num_replicas)
        if self._scaling is not None:
            num_replicas = self._scaling.autoscaler.wanted  # `scale` may have set another one meanwhile
        await self._resize(num_replicas)

    async def _scale_by_demand(self, scaling: DemandScaling) -> None:
        await self._is_ready.wait()
        if not self._is_over:
            await scaling.run()

    async def start_first(self) -> None:
        """Replica 0 was held, and may start now; returns when it is ready. Raises EngineDeadError."""
        self._is_first_held = False
        replica = self._replicas.get(0)
        if replica is not None and not self._is_over:
            self._spawn(replica)
            await self._settled(replica)

    @staticmethod
    async def _settled(replica: Replica) -> None:
        """Returns when it is ready. Raises EngineDeadError: its start failed; it is tried again behind."""
        if replica.events is not None:
            await replica.events.is_settled.wait()
        if replica.state == "lost":
            raise EngineDeadError(f"replica {replica.number} did not start: {replica.last_failure}")

    async def _divide_cores(self, num_replicas: int) -> None:
        """Each has its share of the cores from now on, those that run and those that start."""
        if self._given.num_threads is not None:
            return
        async with anyio.create_task_group() as group:
            for replica in self._replicas.values():
                share = replica_config(self._given, replica.number, num_replicas, self._board_file.path).cpu_share
                replica.change_config(partial(_with_share, share=share))
                if not replica.is_remote and replica.supervisor.state in ("running", "recovering"):
                    group.start_soon(self._limit_threads, replica)

    @staticmethod
    async def _limit_threads(replica: Replica) -> None:
        with contextlib.suppress(ActorLLMError):  # it ends, or starts again with its share
            await replica.frontend.ask_scheduler("limit_threads", num_threads=num_threads(replica.config))

    async def _remove(self, replica: Replica) -> None:
        replica.is_removed = True
        if self.attached is not None:
            self.attached.tell("removed", replica=replica.number)
        if self.dispatcher.can_move(replica):
            self.dispatcher.move(replica, lost_at=None)
        self.dispatcher.move_rest(replica)
        replica.request_stop(self._stop_timeout_s)
        if replica.events is not None:
            await replica.events.has_ended.wait()
        del self._replicas[replica.number]
        if self._placement is not None and replica.is_remote:
            with anyio.move_on_after(RELEASE_TIMEOUT_S):
                await to_thread.run_sync(self._placement.release, replica.number, abandon_on_cancel=True)

    async def drain(self, number: int, is_draining: bool = True) -> None:
        """Let a replica take no new requests, and move its streams; False: it takes requests again.

        Raises InvalidParameterError: there is no such replica, or no other one that takes requests.
        """
        replica = self._replicas.get(number)
        if replica is None:
            known = ", ".join(map(str, sorted(self._replicas)))
            raise InvalidParameterError(f"there is no replica {shown(number)}; there are {known}")
        if is_draining and not self.dispatcher.can_move(replica):
            raise InvalidParameterError(
                f"replica {number} is the only one that takes requests; scale up before it is drained"
            )
        replica.is_draining = is_draining
        if self.attached is not None:
            self.attached.tell("draining", replica=number, is_draining=is_draining)
        if is_draining:
            self.dispatcher.move(replica, lost_at=None)
        elif replica.frontend.is_linked:
            self.dispatcher.end_wait(replica)

    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None:
        """As `Supervisor.change_config`, for every replica that there is or will be."""
        self.config, self._given = change(self.config), change(self._given)
        for replica in self._replicas.values():
            replica.change_config(change)

    def starting(self) -> list[anyio.Event]:
        """As `Engine.starting`."""
        replicas = self._replicas.values()
        return [
            one.events.is_settled for one in replicas if one.state in ("new", "starting") and one.events is not None
        ]

    # What is known of them

    @property
    def pids(self) -> dict[str, int]:
        """The processes of all replicas, by replica and actor."""
        return {
            f"replica{replica.number}/{name}": pid
            for replica in list(self._replicas.values())
            for name, pid in replica.supervisor.pids.items()
        }

    def statistics(self) -> dict[str, Any]:
        """As Supervisor.statistics, added up; those of each are in "replicas". From any thread."""
        replicas = list(self._replicas.values())
        found = {replica.number: replica.supervisor.statistics() for replica in replicas}
        named = {f"replica{n}/{name}": actor for n, one in found.items() for name, actor in one["actors"].items()}
        sums = ("num_parked", "parked_memory_bytes", "num_recoveries", "recovery_s")
        return {
            "phase": self._state([replica.state for replica in replicas]),
            "actors": named,
            **{name: sum(one[name] for one in found.values()) for name in sums},
            "max_recovery_s": max((one["max_recovery_s"] for one in found.values()), default=0.0),
            "scaling": None if self._scaling is None else self._scaling.statistics(),
            "replicas": found,
        }

    def health(self) -> EngineHealth:
        """From any thread."""
        replicas = [replica.health() for replica in list(self._replicas.values())]
        actors = {f"replica{one.number}/{name}": actor for one in replicas for name, actor in one.actors.items()}
        return EngineHealth(
            self._state([one.state for one in replicas]),
            actors,
            sum(one.num_recoveries for one in replicas),
            sum(one.recovery_s for one in replicas),
            next((one.last_failure for one in reversed(replicas) if one.last_failure is not None), None),
            replicas=replicas,
        )

    def _state(self, states: list[str]) -> EngineState:
        """running: a request is taken now, by some replica."""
        if self.failure is not None:
            return "dead"
        if self._tasks is None:
            return "new"
        if self._is_over:
            return "stopped"
        if self._on_ready is not None:
            return "starting"
        return "running" if {"running", "draining"} & set(states) else "recovering"
