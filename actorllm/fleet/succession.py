"""`Succession`: the service of an engine that was built with one replica, which a fleet may follow (`scale`).

It runs the one supervisor and nothing else, until a fleet is to take over. The fleet starts beside it, without the replica that
has the first number. Then all streams move to the fleet as from a replica that is drained, and the supervisor is stopped. Its place
is taken by a replica as the others are, on the devices that it had. So never more than the wanted number of replicas have memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from actorllm.actors.engine_thread import STOP_TIMEOUT_S
from actorllm.errors import EngineError, EngineShutdownError
from actorllm.fleet.fleet import Fleet
from actorllm.supervision.supervisor import Supervisor


class Succession:
    """See the module docstring. A Service (see `engine_thread`); everything but `kill` is called on the engine's loop."""

    def __init__(self, first: Supervisor) -> None:
        self._first = first
        self._fleet: Fleet | None = None
        self._is_followed = False
        self._first_ended: anyio.Event
        self._tasks: TaskGroup

    @property
    def config(self) -> Any:
        return self._current.config

    @property
    def failure(self) -> EngineError | None:
        return self._current.failure

    @property
    def _current(self) -> Supervisor | Fleet:
        return self._fleet if self._fleet is not None and self._is_followed else self._first

    async def run(self, on_ready: Callable[[], object]) -> None:
        """The engine's whole life, whichever of them has it."""
        self._first_ended = anyio.Event()
        failure: Exception | None = None
        async with anyio.create_task_group() as self._tasks:
            try:
                await self._first.run(on_ready)
            except Exception as error:  # raised outside of the group, which would wrap it
                failure = error
            finally:
                self._first_ended.set()
                if not self._is_followed and self._fleet is not None:
                    self._fleet.request_stop()
        if failure is not None:
            raise failure

    def request_stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        self._first.request_stop(timeout)
        if self._fleet is not None:
            self._fleet.request_stop(timeout)

    def kill(self) -> None:
        self._first.kill()
        if self._fleet is not None:
            self._fleet.kill()

    async def start(self, fleet: Fleet) -> None:
        """Start a fleet beside what runs. Raises what its start raised; nothing is left of it then."""
        self._fleet = fleet
        decided, errors = anyio.Event(), list[Exception]()

        async def run() -> None:
            try:
                await fleet.run(decided.set)
            except Exception as error:  # the caller that started the fleet is told
                errors.append(error)
            finally:
                decided.set()

        self._tasks.start_soon(run)
        try:
            await decided.wait()
        except BaseException:
            self.give_up()
            raise
        if errors:
            self._fleet = None
            raise errors[0]
        if self._first_ended.is_set():
            raise EngineShutdownError("the engine was shut down")

    def give_up(self) -> None:
        """The fleet that was started is not to follow."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.request_stop()

    async def follow(self) -> None:
        """The fleet has the streams: stop what ran before, and wait until it has ended."""
        self._is_followed = True
        self._first.request_stop()
        await self._first_ended.wait()
