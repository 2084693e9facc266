"""What the loop of the scheduler actor does besides planning: each concern is a `LoopPart` with a place in `SchedulerActor.turn`.

A part owns its state and decides by itself whether there is anything to do. The loop knows only the five hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from actorllm.actors.constraints import Constraints
from actorllm.actors.outlet import Outlet
from actorllm.clock import now
from actorllm.messages import Submit
from actorllm.scheduling.events import End, Events
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key
from actorllm.supervision.blame.scheduler_probes import SchedulerProbes


class LoopHost(Protocol):
    """What parts ask of the actor whose loop they belong to."""

    scheduler: Scheduler

    @property
    def has_workers(self) -> bool: ...
    def wake(self) -> None: ...
    def waker(self) -> Callable[[], object] | None: ...
    def send_ends(self, ends: list[End]) -> None:
        """Of requests that end without a step."""

    def take_on(self, key: Key, message: Submit, is_let_in: bool = False) -> list[End]:
        """Give a request to the scheduler."""


class LoopPart:
    """One concern of the loop. Every hook does nothing unless a part overrides it."""

    def before_plan(self) -> None:
        """The inbox has been taken; steps are planned next."""

    def after_plan(self) -> None:
        """All steps that there is room for have been planned."""

    def before_send(self, events: Events) -> None:
        """The result of a step has been applied, and what it brought is sent next."""

    def after_result(self, events: Events) -> None:
        """The result of a step has been applied, and what it brought has been sent."""

    def next_deadline(self) -> float:
        """When the loop must turn even if nothing arrives; monotonic seconds, infinity for never."""
        return math.inf


def hooks(parts: Iterable[LoopPart], name: str) -> tuple[Callable[..., Any], ...]:
    """The bound hooks of this name that parts override, in the order of the parts."""
    base = getattr(LoopPart, name)
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not base)


class PoisonIsolation(LoopPart):
    """Takes on requests that schedulers may have died of, one probe group after the other (`SchedulerProbes`)."""

    def __init__(self, host: LoopHost, probes: SchedulerProbes[Outlet]) -> None:
        self._host = host
        self._probes = probes

    def before_plan(self) -> None:
        # Without workers nothing is proven: a scheduler that is killed meanwhile has not died of what it would have taken on.
        if not self._probes.is_on or not self._host.has_workers:
            return
        ends: list[End] = []
        while requests := self._probes.next_requests():
            for key, message in requests:
                ends += self._host.take_on(key, message, is_let_in=True)
        self._host.send_ends(ends)

    def after_plan(self) -> None:
        if self._probes.is_on and self._probes.is_stuck(self._host.has_workers):
            self._probes.on_step(())  # there is nothing to wait for
            self._host.wake()

    def after_result(self, events: Events) -> None:
        if self._probes.is_on:
            self._probes.on_result(sequence.key for sequence in events.sequences)

    def next_deadline(self) -> float:
        return self._probes.wakes_at if self._probes.is_on else math.inf


class DeadlineExpiry(LoopPart):
    """Ends what is past its deadline at once, and not only when the step in flight is done."""

    def __init__(self, host: LoopHost, probes: SchedulerProbes[Outlet]) -> None:
        self._host = host
        self._probes = probes

    def before_plan(self) -> None:
        scheduler = self._host.scheduler
        if scheduler.expires_at == math.inf and not self._probes.is_on:
            return
        at = now()
        if scheduler.expires_at <= at:
            self._host.send_ends(scheduler.expire(at))
        if self._probes.is_on:
            self._host.send_ends(self._probes.expire(at))

    def next_deadline(self) -> float:
        return self._host.scheduler.expires_at


class Grammars(LoopPart):
    """Lets requests go on whose grammar has been compiled, and refuses those whose grammar cannot be."""

    def __init__(self, host: LoopHost, constraints: Constraints) -> None:
        self._host = host
        self._constraints = constraints

    def before_plan(self) -> None:
        if self._constraints.is_making:
            self._host.send_ends(self._constraints.make(self._host.waker()))

    def next_deadline(self) -> float:
        return self._constraints.expires_at
