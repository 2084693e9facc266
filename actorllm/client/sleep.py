"""`Sleep`: whether an engine sleeps, as the program that owns it knows. A part of `Engine`.

All replicas sleep, or the caller is told of the one that does not. Runs on the engine's thread, apart from the properties.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import anyio

from actorllm.errors import ActorLLMError, EngineError, EngineSleepingError
from actorllm.types.sleep import SLEEPING_PARTS, SleepRequests


class SleepingEngine(Protocol):
    """What sleeping asks of its engine."""

    async def ask_all_schedulers(self, verb: str, **arguments: Any) -> Any: ...
    def starting(self) -> list[anyio.Event]: ...


class Sleep:
    """See the module docstring."""

    def __init__(self, engine: SleepingEngine) -> None:
        self._engine = engine
        self._asleep: frozenset[str] = frozenset()
        self._refuses = False
        self._is_under_way = False

    @property
    def is_sleeping(self) -> bool:
        """Something of it sleeps, so that no step is computed."""
        return bool(self._asleep)

    def check_request(self) -> None:
        """Raises EngineSleepingError for a request that is to be refused."""
        if self._asleep and self._refuses:
            raise EngineSleepingError("the engine sleeps and takes no requests; wake_up() lets it go on")

    async def fall_asleep(self, level: int, mode: str, requests: SleepRequests) -> int:
        """Returns how many bytes all workers hold less. Raises EngineError, or what a worker raised."""

        async def sleep() -> int:
            before = self._asleep, self._refuses
            self._asleep, self._refuses = frozenset(SLEEPING_PARTS), requests == "refuse"
            try:
                starting = self._engine.starting()
                freed = int(await self._engine.ask_all_schedulers("sleep", timeout=math.inf, level=level, mode=mode))
                while starting:  # which was not asked
                    for has_started in starting:
                        await has_started.wait()
                    starting = self._engine.starting()
                    more = await self._engine.ask_all_schedulers("sleep", timeout=math.inf, level=level, mode=mode)
                    freed += int(more)
            except BaseException as error:
                self._asleep, self._refuses = before
                if isinstance(error, ActorLLMError) and not before[0]:
                    await self._wake_those_asleep()
                raise
            return freed

        return int(await self._alone(sleep))

    async def _wake_those_asleep(self) -> None:
        """One replica cannot sleep: the others would keep requests waiting that are routed to them."""
        with contextlib.suppress(
            ActorLLMError
        ):  # the caller is told of the first error, of which this may be another one
            await self._engine.ask_all_schedulers("wake_up", timeout=math.inf, tags=list(SLEEPING_PARTS))

    async def wake_up(self, tags: list[str]) -> None:
        """Raises EngineError, or what a worker raised: then it goes on sleeping, and may be woken again."""

        async def wake() -> None:
            left = await self._engine.ask_all_schedulers("wake_up", timeout=math.inf, tags=tags)
            self._asleep = frozenset(left)

        await self._alone(wake)

    def note_new_weights(self) -> None:
        """An update has woken the weights."""
        if not self._is_under_way:  # else what comes of that counts
            self._asleep -= {"weights"}

    async def _alone(self, change: Callable[[], Any]) -> Any:
        if self._is_under_way:
            raise EngineError("the engine falls asleep or wakes up; wait for that before the next call")
        self._is_under_way = True
        try:
            return await change()
        finally:
            self._is_under_way = False

    def forget(self) -> None:
        """The processes have ended."""
        self._asleep, self._refuses = frozenset(), False
