"""`Pausing`: how generation is paused and resumed, how an engine drains, and which callers are told when it is done.

Owns the mode of the pause, which every frontend can tell the next scheduler, and the events that callers wait for. A part of the
scheduler actor's loop.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

import anyio
import numpy as np

from actorllm.actors.loop_parts import LoopHost, LoopPart
from actorllm.actors.outlet import ForFrontend, Outlet
from actorllm.clock import now
from actorllm.messages import PauseChanged
from actorllm.scheduling.events import End
from actorllm.scheduling.pause import PauseState
from actorllm.supervision.blame.scheduler_probes import SchedulerProbes


class PausedHost(LoopHost, Protocol):
    """What pausing asks of the actor besides."""

    def take_inbox(self) -> None: ...
    def send_to(self, outlet: Outlet, outputs: ForFrontend) -> None: ...
    def abort_held(self) -> list[End]:
        """End what was submitted and is not the scheduler's yet."""


class Pausing(LoopPart):
    """See the module docstring.

    outlets: all frontends, by number; full: those of them that take no outputs at present.
    """

    def __init__(
        self,
        host: PausedHost,
        probes: SchedulerProbes[Outlet],
        outlets: Mapping[int, Outlet],
        full: Mapping[int, Outlet],
    ) -> None:
        self._host = host
        self._probes = probes
        self._outlets = outlets
        self._full = full
        self._mode: str | None = None
        self._is_known = False
        """A caller has paused or resumed this scheduler, or a frontend has told it of a pause."""
        self._drained: anyio.Event | None = None
        self._idle: anyio.Event | None = None
        self.is_draining = False
        """Attached frontends may submit nothing new."""

    # Verbs

    def pause(self, mode: str, clear_cache: bool) -> Coroutine[Any, Any, bool]:
        """The pause has begun when this returns; its result comes when nothing is going on any more.

        False: generation was resumed before that.
        """
        return self._finish(self.begin(mode), clear_cache)

    def restore(self, mode: str) -> None:
        """A frontend tells of a pause of the scheduler before; not believed by a scheduler that knows better."""
        if not self._is_known:
            self.begin(mode)

    def resume(self) -> None:
        self._host.scheduler.resume(now())
        self._tell(None)
        self._tell_if_drained()
        self._host.wake()

    async def drain(self) -> bool:
        """Refuse what attached frontends submit from now on, and wait until every request has ended."""
        self.is_draining = True
        if self._idle is None:
            self._idle = anyio.Event()
        self._host.wake()
        await self._idle.wait()
        return True

    # The loop

    def after_plan(self) -> None:
        if self._drained is not None:
            self._tell_if_drained()
        if self._idle is not None:
            self._tell_if_idle()

    def on_frontend(self, outlet: Outlet) -> None:
        """A frontend is linked: it must know of a pause, to tell the next scheduler."""
        if self._host.scheduler.pause_state is not PauseState.RUNNING:
            self._host.send_to(outlet, PauseChanged(mode=self._mode))

    def begin(self, mode: str) -> anyio.Event:
        """Start nothing from now on. Returns what is set when nothing is going on any more."""
        host = self._host
        host.take_inbox()  # what was sent before is from before
        host.send_ends([*host.scheduler.pause(mode, now()), *(host.abort_held() if mode == "abort" else ())])
        self._tell(mode)
        if self._drained is None:
            self._drained = anyio.Event()
        host.wake()
        return self._drained

    async def _finish(self, drained: anyio.Event, clear_cache: bool) -> bool:
        await drained.wait()
        scheduler = self._host.scheduler
        if scheduler.pause_state is PauseState.RUNNING:
            return False
        if clear_cache:
            scheduler.reset_prefix_cache(now(), reset_running_requests=True)
        return True

    def _tell(self, mode: str | None) -> None:
        """Every frontend can tell the next scheduler, whichever of them paused or resumed this one."""
        self._is_known = True
        self._mode = mode
        started: dict[int, list[int]] = {number: [] for number in self._outlets}
        if mode == "wait":
            for number, rid in self._host.scheduler.started:
                started.setdefault(number, []).append(rid)
        for number, outlet in list(self._outlets.items()):
            self._host.send_to(outlet, PauseChanged(mode=mode, started=np.array(started[number], np.int32)))

    def _tell_if_drained(self) -> None:
        if self._drained is None:
            return
        state = self._host.scheduler.pause_state
        is_over = self._host.scheduler.is_drained
        if state is PauseState.NOTHING_NEW:  # what had started finishes, wherever it is now
            is_over = is_over and not self._probes.resubmitting and not self._probes.has_started
        if is_over or state is PauseState.RUNNING:
            self._drained.set()
            self._drained = None

    def _tell_if_idle(self) -> None:
        if self._idle is None or not self._host.scheduler.is_idle or self._probes.resubmitting or self._probes.has_held:
            return
        if not any(outlet.deferred for outlet in self._full.values()):
            self._idle.set()
            self._idle = None
