"""`FleetEngine`: an engine of processes, as the front doors use it, which has or may get several replicas."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import anyio

from actorllm.actors.engine_thread import EngineThread, Service
from actorllm.actors.frontend import FrontendActor
from actorllm.attach.server import AttachServer, Joinable
from actorllm.client.engine import CACHE_MEMORY, Engine
from actorllm.client.stat_recorder import StatRecorder
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, EngineDrainingError, EngineError
from actorllm.fleet.fleet import Fleet, check_num_replicas
from actorllm.fleet.succession import Succession
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.renewal import MeetingPlace
from actorllm.supervision.supervisor import Supervisor
from actorllm.types.launch import EXTERNAL


def new_engine(config: EngineConfig, *, is_synchronous: bool = False) -> Engine:
    """Arguments as of `Engine`. Raises ConfigError under a launcher, where `LLM` alone works."""
    if config.is_launched:
        raise ConfigError(
            f"distributed_executor_backend={EXTERNAL!r} is for LLM, whose calls every rank makes; use that"
        )
    kind = Engine if config.topology == "inline" else FleetEngine
    return kind(config, is_synchronous=is_synchronous)


class FleetEngine(Engine):
    """Several replicas behind one intake (`actorllm.fleet.fleet`). One replica needs no fleet, and pays for none.

    An engine that was built with one gets a fleet when `scale` asks for more (`succession`).
    """

    _fleet: Fleet | None
    _is_growing = False

    def _make(self) -> None:
        self._fleet = None
        if not self.config.is_fleet:
            super()._make()
            return
        fleet = Fleet(self.config, self._last_rid, self._on_end)
        self._take(fleet)
        self._meeting_place = MeetingPlace()
        self._thread = EngineThread(self._behind_door(fleet))

    def _alone(self, supervisor: Supervisor) -> Joinable:
        self._succession = Succession(supervisor)
        return self._succession

    def _take(self, fleet: Fleet) -> None:
        self._fleet = self._supervisor = fleet
        self._frontend = fleet.dispatcher

    def _behind_door(self, fleet: Fleet) -> Service:
        """The fleet, behind a door for others if the engine has a name."""
        if self.config.name is None or sys.platform != "linux":
            return fleet
        self._attach_server = fleet.attached = AttachServer(
            self.config.name, fleet, fleet.dispatcher, fleet.running, fleet.board, fleet.places, fleet.draining
        )
        return self._attach_server

    def _on_death(self, death: ActorDeath) -> None:
        if self._fleet is None:  # else it is of the one that the fleet follows
            super()._on_death(death)

    def _on_end(self, error: EngineError) -> None:
        self._death = error
        CACHE_MEMORY.release(self)
        if self._fleet is not None:
            self._fleet.dispatcher.fail_all(error)

    @property
    def replica_numbers(self) -> list[int]:
        return [0] if self._fleet is None else sorted(self._fleet.replicas)

    def look(self, after: Mapping[int, int], at_most: int) -> Future[Any]:
        if self._fleet is None:
            return super().look(after, at_most)
        return self.ask_scheduler("live", after=dict(after), at_most=at_most)

    def _observe(self, recorder: StatRecorder) -> None:
        if self._fleet is None:
            super()._observe(recorder)
        else:
            self._thread.call(self._fleet.observe, recorder.of)

    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None:
        if self._fleet is None:
            super().change_config(change)
            return
        self._fleet.change_config(change)
        self.config, self._given = change(self.config), change(self._given)

    def starting(self) -> list[anyio.Event]:
        return [] if self._fleet is None else self._fleet.starting()

    async def _wait_until_idle(self) -> None:
        with self._unless_all_are_lost():
            await super()._wait_until_idle()

    async def _abort_all(self) -> None:
        with self._unless_all_are_lost():
            await super()._abort_all()

    def _unless_all_are_lost(self) -> contextlib.AbstractContextManager[None]:
        """Where no replica runs, what is left is in the journals alone, which `Draining` waits for in any case."""
        return contextlib.nullcontext() if self._fleet is None else contextlib.suppress(EngineError)

    def drain_replica(self, number: int, is_draining: bool = True) -> Future[None]:
        self._check()
        if self._fleet is None:
            return super().drain_replica(number, is_draining)
        return self._thread.call(self._fleet.drain, number, is_draining)

    # The number of replicas

    def scale(self, num_replicas: int) -> Future[None]:
        self._check()
        return self._thread.call(self._scale, num_replicas)

    async def _scale(self, num_replicas: int) -> None:
        if self._fleet is None:
            check_num_replicas(num_replicas)
            if num_replicas > 1:
                await self._grow(num_replicas)
        else:
            await self._fleet.scale(num_replicas)

    async def _grow(self, num_replicas: int) -> None:
        """Have a fleet take the place of the one replica; see `succession`."""
        if self._is_growing:
            raise EngineError("the engine gets its first replicas just now; wait for that")
        self._check_growth(self._given)
        given = self._given
        model = replace(given.model, scheme=self.config.model.scheme)  # moved streams keep their bits
        config = replace(given, model=model, data_parallel_size=num_replicas, ready_replicas=num_replicas - 1)
        frontend = cast(FrontendActor, self._frontend)
        fleet = Fleet(config, frontend.last_rid, self._on_end, is_first_held=True)
        self._is_growing = True
        try:
            await self._succession.start(fleet)
            try:
                await fleet.dispatcher.pause_as(frontend)
                self._check_growth(given)
            except BaseException:
                self._succession.give_up()
                raise
            # From here to the next `await` nothing comes between: a request is in one journal or in the other.
            self._given = replace(given, data_parallel_size=num_replicas)
            self.config = fleet.config
            self._take(fleet)
            if self.stat_recorder is not None:
                fleet.observe(self.stat_recorder.of)
            fleet.dispatcher.take_over(frontend)
            if self._attach_server is not None:
                fleet.attached = self._attach_server
                self._attach_server.serve(fleet.dispatcher, fleet.running, fleet.board, fleet.places, fleet.draining)
        finally:
            self._is_growing = False
        with anyio.CancelScope(shield=True):  # a caller that waits no more leaves no engine without its first replica
            await self._succession.follow()
            CACHE_MEMORY.release(self)
            await fleet.start_first()

    def _check_growth(self, given: EngineConfig) -> None:
        """Raises EngineError: something goes on that the one replica alone can do. given: the configuration of its start."""
        if self._is_draining:
            raise EngineDrainingError("the engine is draining, and gets no replicas")
        if self._given is not given:
            raise EngineError("the weights were changed while the replicas started; scale the engine once more")
        if self._attach_server is not None and self._attach_server.num_attached:
            raise EngineError(
                f"programs have joined engine {self.config.name!r}, which know of one replica; build it with "
                f"data_parallel_size of 2 or more, or scale it before they join"
            )
