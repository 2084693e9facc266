"""`SimulatedScaling`: a fleet in virtual time whose number of replicas an `Autoscaler` decides, the same object as in the engine.

A replica takes requests `start_s` after it was wanted, with an empty cache. One that is not wanted any more takes no new
requests, and ends when it has none. In the engine its streams move, so it ends sooner there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from actorllm.scheduling.autoscaler import Autoscaler
from actorllm.scheduling.events import End
from actorllm.scheduling.router import ReplicaView, Routable
from actorllm.scheduling.scheduler import Scheduler


class ScalableReplica(Protocol):
    """What is scaled (`simulator.SimulatedReplica`)."""

    number: int
    scheduler: Scheduler

    @property
    def next_event_at(self) -> float: ...
    def run_until(self, until: float) -> None: ...
    def view(self, now: float) -> ReplicaView: ...


class Life(NamedTuple):
    """Of a replica: when it was asked for, when it took requests first, and when it had ended (infinity: not yet)."""

    number: int
    wanted_at: float
    ready_at: float
    ended_at: float = math.inf


class SimulatedScaling:
    """See the module docstring.

    Arguments:
        autoscaler: which decides, once in each of its periods.
        replicas: as many as there may be, by number.
        start_s: from the decision until a new replica takes requests.
    """

    def __init__(self, autoscaler: Autoscaler, replicas: Sequence[ScalableReplica], start_s: float) -> None:
        self.autoscaler = autoscaler
        self.next_tick = 0.0
        self.decisions: list[tuple[float, int]] = [(0.0, autoscaler.wanted)]
        """When the wanted number became which."""
        self.ended: list[Life] = []
        self._lengths: dict[int, int] = {}
        """Of requests under way."""
        self._replicas = replicas
        self._start_s = start_s
        self._lives = {number: Life(number, 0.0, 0.0) for number in range(autoscaler.wanted)}

    @classmethod
    def of(
        cls, autoscaler: Autoscaler | None, replicas: Sequence[ScalableReplica], start_s: float
    ) -> SimulatedScaling | None:
        """None without an autoscaler."""
        return None if autoscaler is None else cls(autoscaler, replicas, start_s)

    def ready(self, at: float) -> list[ScalableReplica]:
        """Those that take requests."""
        wanted = self.autoscaler.wanted
        return [self._replicas[n] for n, life in sorted(self._lives.items()) if n < wanted and life.ready_at <= at]

    def note(self, number: int, num_output: int, request: Routable, views: Iterable[ReplicaView], at: float) -> None:
        """A request arrived. number: by which replicas know it. num_output: tokens that it has at its end."""
        self._lengths[number] = num_output
        self.autoscaler.note(request, views, at)

    def note_ends(self, ends: Iterable[End]) -> None:
        """Sequences ended."""
        for end in ends:
            self.autoscaler.note_ends(1, self._lengths.pop(end.sequence.key[1], 0))

    def run_before(self, at: float) -> bool:
        """Decide whatever is to be decided until then; whether anything was. Replicas have not been run further."""
        has_decided = self.next_tick <= at
        while self.next_tick <= at:
            self.tick()
        return has_decided

    def run_to_end(self, until: float) -> None:
        """Go on until nothing happens any more."""
        while self.next_tick < until and any(replica.next_event_at < math.inf for replica in self._replicas):
            self.tick()

    def tick(self) -> None:
        """Run all replicas up to the next decision, and decide."""
        at = self.next_tick
        self.next_tick += self.autoscaler.policy.period_s
        for replica in self._replicas:
            replica.run_until(at)
        before = self.autoscaler.wanted
        wanted = self.autoscaler.decide([replica.view(at) for replica in self.ready(at)], at)
        if wanted != before:
            self.decisions.append((at, wanted))
        for number in range(wanted):
            life = self._lives.get(number)
            if life is None:
                self._replicas[number].scheduler.reset_prefix_cache(at)
                self._lives[number] = Life(number, at, at + self._start_s)
            elif before <= number:  # it had not ended: another one starts in its place
                self._lives[number] = life._replace(ready_at=at + self._start_s)
        for number in [n for n in self._lives if n >= wanted]:
            life = self._lives[number]
            if life.ready_at > at or not self._replicas[number].view(at).load:
                self.ended.append(life._replace(ended_at=at))
                del self._lives[number]

    def replica_seconds(self, end: float) -> float:
        """How long replicas were there, their starts included. end: of the run."""
        lives = [*self.ended, *self._lives.values()]
        return sum(max(0.0, min(life.ended_at, end) - life.wanted_at) for life in lives)
