"""`Standby`: parked processes, each of which can take the place of a worker that dies.

Most of a worker's start is the import of torch. A parked process has done that, at the lowest priority. It knows nothing
of any engine, has no CUDA context, and waits. Owns those that are not taken yet; one that dies is replaced, a few times.
Used by the supervisor, on the engine's loop.

With `standby_worker=None`, the default, an engine of one worker parks one process while memory is plentiful. It does so
`PARK_AFTER_S` after its start, because most engines that end sooner never need it. Ranks are started again together: one
parked process would make none of them sooner. So several ranks have none by default, and with `standby_worker=True` one
each, at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup

from actorllm.actors.engine_thread import current_loop
from actorllm.actors.heartbeat import is_stopped
from actorllm.actors.topology import ActorSpec
from actorllm.config import EngineConfig
from actorllm.errors import ActorLLMError
from actorllm.model.memory import available_bytes
from actorllm.supervision.children import Child, ProcessChild
from actorllm.supervision.death import ActorDeath

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Of parked processes, after which none is parked any more: the engine does without."""
PARK_AFTER_S = 20.0
"""So long an engine runs, or runs again, before it parks a process of its own accord."""
PARKED_BYTES = 160 << 20
"""What a process with torch holds that no other process shares (CPU build, measured)."""
MEMORY_MULTIPLE = 8
"""So many times that must be available: what is parked of the engine's own accord must not be what memory ends for."""


@dataclass(frozen=True, slots=True)
class StandbyOptions:
    """For which group processes are parked, and when."""

    group: str
    delay_s: float = 0.0
    """After the group has begun to run."""
    min_available_bytes: int = 0
    """None is parked while there is less."""

    @classmethod
    def of(cls, config: EngineConfig) -> StandbyOptions | None:
        """What `standby_worker` asks for; None: nothing."""
        match config.standby_worker:
            case True:
                return cls("workers")
            case None if config.num_workers == 1:
                return cls("workers", PARK_AFTER_S, MEMORY_MULTIPLE * PARKED_BYTES)
        return None


class Standby:
    """Parked processes of an engine that runs."""

    def __init__(self, tasks: TaskGroup, config: Any, options: StandbyOptions) -> None:
        self._tasks = tasks
        self._config = config
        self._options = options
        self._parked: list[ProcessChild] = []
        self._awaited: list[ActorSpec] = []
        self._num_deaths = 0

    @property
    def parked(self) -> tuple[ProcessChild, ...]:
        """Those that are not taken yet, ready or not."""
        return tuple(self._parked)

    @property
    def num_parked(self) -> int:
        """Those that have loaded everything."""
        return sum(child.parked_bytes is not None for child in self.parked)

    @property
    def memory_bytes(self) -> int:
        """What these hold."""
        return sum(child.parked_bytes or 0 for child in self.parked)

    def fill(self, specs: Iterable[ActorSpec]) -> None:
        """Park one for each of these, unless it is there. What cannot be parked is done without."""
        for spec in specs:
            is_there = spec in self._awaited or any(child.spec is spec for child in self._parked)
            if self._num_deaths < MAX_DEATHS and not is_there:
                self._awaited.append(spec)
                self._tasks.start_soon(self._park, spec)

    def take(self, spec: ActorSpec) -> ProcessChild | None:
        """One that can become this actor at once; from now on it is the caller's."""
        for child in self._parked:
            if child.spec is spec and child.pid is not None and child.parked_bytes is not None:
                if is_stopped(child.pid):
                    child.kill()
                    return None
                self._parked.remove(child)
                return child
        return None

    def close(self) -> list[ProcessChild]:
        """Kill those that are parked, and park no more. They are the caller's now, which waits for their end."""
        self._num_deaths = MAX_DEATHS
        parked, self._parked = self._parked, []
        for child in parked:
            child.kill()
        return parked

    async def _park(self, spec: ActorSpec) -> None:
        try:
            await self._until_there_is_room()
            if self._num_deaths < MAX_DEATHS:
                await self._spawn(spec)
        finally:
            self._awaited.remove(spec)

    async def _until_there_is_room(self) -> None:
        options = self._options
        while True:
            await anyio.sleep(options.delay_s)
            if not options.min_available_bytes or available_bytes() >= options.min_available_bytes:
                return

    async def _spawn(self, spec: ActorSpec) -> None:
        child = ProcessChild(spec, self._on_end, current_loop())
        try:
            await child.spawn(self._tasks, self._config)
        except (ActorLLMError, OSError) as error:
            logger.warning("no process can be parked for %s: %s", spec.name, error)
            return
        child.park()
        self._parked.append(child)

    def _on_end(self, child: Child, death: ActorDeath) -> None:
        """A parked one died."""
        if child in self._parked:
            self._parked.remove(child)
            self._num_deaths += 1
            fields = {"event": "parked death", "actors": (death.actor,)}
            logger.warning("parked for %s", death, extra=fields)
            self.fill([child.spec])
