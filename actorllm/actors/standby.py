"""`Standby`: processes that are parked until somebody dies whose place they can take.

Most of what a worker's start takes is the import of torch. A parked process has done that, knows nothing of any engine and
waits. Owns those that nobody has taken yet; one that dies is replaced, a few times. Used by the supervisor, on the
engine's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from anyio.abc import TaskGroup

from actorllm.actors.death import ActorDeath
from actorllm.actors.engine_thread import current_loop
from actorllm.actors.placements import Child, ProcessChild
from actorllm.actors.pulse import is_stopped
from actorllm.actors.topology import ActorSpec
from actorllm.errors import ActorLLMError

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Of parked processes, after which none is parked any more: the engine does without."""


class Standby:
    """Parked processes of an engine that runs."""

    def __init__(self, tasks: TaskGroup, config: Any) -> None:
        self._tasks = tasks
        self._config = config
        self._parked: list[ProcessChild] = []
        self._num_deaths = 0

    @property
    def parked(self) -> tuple[ProcessChild, ...]:
        """Those that nobody has taken."""
        return tuple(self._parked)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def fill(self, specs: Iterable[ActorSpec]) -> None:
        """Park one for each of these, unless it is there. What cannot be parked is done without."""
        for spec in specs:
            if self._num_deaths < MAX_DEATHS and not any(child.spec is spec for child in self._parked):
                self._tasks.start_soon(self._park, spec)

    def take(self, spec: ActorSpec) -> ProcessChild | None:
        """One that can become this actor; from now on it is the caller's."""
        for child in self._parked:
            if child.spec is spec and child.pid is not None:
                if is_stopped(child.pid):
                    child.kill()
                    return None
                self._parked.remove(child)
                return child
        return None

    def close(self) -> list[ProcessChild]:
        """Kill those that are parked, and park no more. They are the caller's, who waits for their end."""
        self._num_deaths = MAX_DEATHS
        parked, self._parked = self._parked, []
        for child in parked:
            child.kill()
        return parked

    async def _park(self, spec: ActorSpec) -> None:
        if self._num_deaths >= MAX_DEATHS:
            return
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
