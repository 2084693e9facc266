"""`FleetEngine`: an engine of several replicas, as the front doors use it; `new_engine` chooses between this and `Engine`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future

from actorllm.actors.engine_thread import EngineThread, Service
from actorllm.attach.server import AttachServer
from actorllm.client.engine import CACHE_MEMORY, Engine
from actorllm.config import EngineConfig
from actorllm.errors import EngineError
from actorllm.fleet.fleet import Fleet
from actorllm.supervision.renewal import MeetingPlace


def new_engine(config: EngineConfig, *, is_synchronous: bool = False) -> Engine:
    """One replica needs no fleet, and pays for none. Arguments as of `Engine`."""
    if config.data_parallel_size == 1:
        return Engine(config, is_synchronous=is_synchronous)
    return FleetEngine(config, is_synchronous=is_synchronous)


class FleetEngine(Engine):
    """Several replicas behind one intake. See `actorllm.fleet.fleet`."""

    def _make(self) -> None:
        self._fleet = Fleet(self.config, self._last_rid, self._on_end)
        self._frontend = self._fleet.dispatcher
        self._meeting_place = MeetingPlace()
        self._supervisor = self._fleet
        self._thread = EngineThread(self._new_service())

    def _new_service(self) -> Service:
        """The fleet, behind a door for others if the engine has a name."""
        fleet = self._fleet
        if self.config.name is None or sys.platform != "linux":
            return fleet
        self._attach_server = fleet.attached = AttachServer(
            self.config.name, fleet, fleet.dispatcher, fleet.running, fleet.board
        )
        return self._attach_server

    def _on_end(self, error: EngineError) -> None:
        self._death = error
        CACHE_MEMORY.release(self)
        self._fleet.dispatcher.fail_all(error)

    @property
    def replica_numbers(self) -> list[int]:
        return sorted(self._fleet.replicas)

    def scale(self, num_replicas: int) -> Future[None]:
        self._check()
        return self._thread.call(self._fleet.scale, num_replicas)

    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None:
        self._fleet.change_config(change)
        self.config, self._given = change(self.config), change(self._given)

    async def settle(self) -> bool:
        return await self._fleet.settle()

    def drain_replica(self, number: int, is_draining: bool = True) -> Future[None]:
        self._check()
        return self._thread.call(self._fleet.drain, number, is_draining)
