"""`Sleeping`: the workers give back the memory of their weights and of the KV cache, and take it again.

A part of the scheduler actor's loop. An engine that sleeps is paused (`Pausing`), so no step is planned, and its prefix cache is
empty. Workers that take the place of others are put to sleep before they get a step. A new scheduler asks them what sleeps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from actorllm.actors.link import Link
from actorllm.actors.pausing import Pausing
from actorllm.actors.step_gate import StepGate
from actorllm.clock import now
from actorllm.errors import EngineError, PeerLostError
from actorllm.scheduling.pause import PauseState
from actorllm.scheduling.scheduler import Scheduler
from actorllm.types.sleep import SLEEPING_PARTS

logger = logging.getLogger(__name__)


class SleepHost(Protocol):
    """What sleeping asks of the actor whose loop it belongs to."""

    scheduler: Scheduler
    has_workers: bool

    def report_defect(self, link: Link, what: str) -> None: ...
    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None: ...
    async def ask_all(self, link: Link, verb: str, timeout: float = ..., **arguments: Any) -> list[Any]: ...


class Sleeping:
    """See the module docstring."""

    def __init__(self, host: SleepHost, gate: StepGate, pausing: Pausing) -> None:
        self._host = host
        self._gate = gate
        self._pausing = pausing
        self._link: Link | None = None
        self._level = 1
        self.asleep: frozenset[str] = frozenset()
        """What the workers have given back or are about to, of SLEEPING_PARTS."""

    # Verbs

    async def sleep(self, level: int, mode: str) -> int:
        """Pause, wait until nothing is going on, and give memory back. Returns how many bytes the workers hold less.

        Raises EngineError, or what a worker raised: then nothing sleeps, and generation goes on.
        """
        host = self._host
        drained = self._pausing.begin(mode)
        if not host.scheduler.is_drained:
            await drained.wait()
        if host.scheduler.pause_state is PauseState.RUNNING:
            raise EngineError("generation was resumed before the engine slept; it does not sleep")
        # Before the workers are asked: generation that is resumed meanwhile would plan steps that they cannot compute.
        self._level, self.asleep = level, frozenset(SLEEPING_PARTS)
        try:
            async with self._gate.closed():
                host.scheduler.reset_prefix_cache(now(), reset_running_requests=True, keeps_tiers=True)
                link = self._workers("nothing sleeps")
                freed = await host.ask_all(link, "sleep", math.inf, level=level)
                self.asleep = frozenset(SLEEPING_PARTS)  # an update may have come before
        except BaseException as error:
            await self._stay_awake()
            raise _without_worker(error) from None
        return sum(freed)

    async def _stay_awake(self) -> None:
        link = self._link
        if link is not None and self._host.has_workers:
            try:
                await self._host.ask_all(link, "wake_up", math.inf, tags=list(SLEEPING_PARTS))
            except PeerLostError:
                pass  # those that come in its place are awake
            except Exception as error:  # the caller is told of the first one; no step may meet memory that is not there
                logger.exception("the workers have not come back from what they had given back")
                self._host.has_workers = False
                self._host.report_defect(link.spokes[0], f"unable to wake up: {error}")
        self.asleep = frozenset()
        self._pausing.resume()

    async def wake_up(self, tags: list[str]) -> list[str]:
        """Let the workers take these parts again. Returns what is still asleep; if nothing is, generation goes on."""
        async with self._gate.closed():
            link = self._workers("the engine goes on sleeping")
            try:
                left = await self._host.ask_all(link, "wake_up", math.inf, tags=tags)
            except PeerLostError as error:
                raise _without_worker(error) from None
            self.asleep = frozenset(part for parts in left for part in parts)
        if not self.asleep:
            self._pausing.resume()
        return sorted(self.asleep)

    def note_new_weights(self) -> None:
        """An update has woken the weights; if nothing else sleeps, generation goes on."""
        if "weights" in self.asleep:
            self.asleep -= {"weights"}
            if not self.asleep:
                self._pausing.resume()

    def check_awake(self) -> None:
        """EngineError: steps cannot be planned."""
        if self.asleep:
            raise EngineError("the engine sleeps; wake_up() lets it go on")

    def _workers(self, consequence: str) -> Link:
        if self._link is None or not self._host.has_workers:
            raise EngineError(f"the workers are being started again, and {consequence}; try again in a moment")
        return self._link

    # Workers

    def on_workers(self, link: Link, ready: Callable[[], None]) -> None:
        """They are ready when they have given back what the others had."""
        self._link = link
        if link.generation == 1:
            ready()
        else:
            self._host.start_soon(self._agree_then, link, ready)

    async def _agree_then(self, link: Link, ready: Callable[[], None]) -> None:
        try:
            if self.asleep:
                await self._host.ask_all(link, "sleep", math.inf, level=self._level)
                kept = [part for part in SLEEPING_PARTS if part not in self.asleep]
                if kept:
                    await self._host.ask_all(link, "wake_up", math.inf, tags=kept)
            else:
                found = await self._host.ask_all(link, "asleep", math.inf)
                self.asleep = frozenset(part for parts in found for part in parts)
        except PeerLostError:
            return
        except Exception as error:  # a rank may not be left in a state that this actor does not know
            logger.exception("the workers do not agree on what sleeps")
            self._host.report_defect(link.spokes[0], f"unable to sleep: {error}")
            return
        if link is self._link:
            ready()

    def statistics(self) -> dict[str, Any]:
        return {"asleep": sorted(self.asleep)}


def _without_worker(error: BaseException) -> BaseException:
    if isinstance(error, PeerLostError):
        return EngineError(f"a worker ended meanwhile: {error}")
    return error
