"""`StepGate`: what happens between two steps, with none in flight and none planned meanwhile.

A part of the scheduler actor's loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from actorllm.actors.loop_parts import LoopHost, LoopPart


class StepGate(LoopPart):
    """See the module docstring. Several may hold it closed at once."""

    def __init__(self, host: LoopHost) -> None:
        self._host = host
        self.num_holders = 0
        """While there are any, no step may be planned."""
        self._drained: anyio.Event | None = None
        self._has_begun: anyio.Event | None = None
        """There are workers again."""

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Entered once no step is in flight. Where there is no loop there is none, and nothing is waited for."""
        self.num_holders += 1
        try:
            while self._host.scheduler.num_in_flight:
                if self._drained is None:
                    self._drained = anyio.Event()
                await self._drained.wait()
            yield
        finally:
            self.num_holders -= 1
            self._host.wake()

    @asynccontextmanager
    async def closed_with_workers(self) -> AsyncIterator[None]:
        """As `closed`, once there are workers; they may still be lost while it is held."""
        while True:
            while not self._host.has_workers:
                if self._has_begun is None:
                    self._has_begun = anyio.Event()
                await self._has_begun.wait()
            async with self.closed():
                if self._host.has_workers:
                    yield
                    return

    def after_plan(self) -> None:
        if self._has_begun is not None and self._host.has_workers:
            self._has_begun.set()
            self._has_begun = None
        if self._drained is not None and not self._host.scheduler.num_in_flight:
            self._drained.set()
            self._drained = None
