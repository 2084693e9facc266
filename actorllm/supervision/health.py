"""`EngineHealth`: what `health()` of a front door returns, with the state of every actor. Plain values, cheap to ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EngineState = Literal["new", "starting", "running", "recovering", "dead", "stopped"]
"""recovering: something died and is started again; requests are taken, and wait."""


@dataclass(frozen=True, slots=True)
class ActorHealth:
    """One actor."""

    state: str
    """running; restarting; new, spawned, starting, started, configuring or configured on the way there; parked, to replace
    another one; failed, ended or dead."""
    pid: int | None
    """None: it has no process of its own, or that is gone."""
    generation: int
    """Its lives so far: 1 until it was started again."""
    last_failure: str | None
    """What its last life ended of."""

    @property
    def num_restarts(self) -> int:
        return self.generation - 1


@dataclass(frozen=True, slots=True)
class ThreadHealth:
    """The threads of this process that do one thing for requests, such as reading their prompts."""

    state: Literal["new", "running", "stuck", "dead"]
    """stuck: one of them does not return, and another one has taken its place; dead: there is none left."""
    num_restarts: int
    """Of threads that died, or were stuck."""
    last_failure: str | None


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """One replica: a scheduler with its workers."""

    number: int
    state: str
    """new, starting, running, recovering or stopped; draining: it takes no new requests; lost: it is made anew after a pause."""
    pids: dict[str, int]
    """Its processes, by actor."""
    num_requests: int
    """Sequences of this program that have not ended."""
    num_lives: int = 1
    """How often it was made, as a whole."""
    actors: dict[str, ActorHealth] = field(default_factory=dict)
    num_recoveries: int = 0
    recovery_s: float = 0.0
    last_failure: str | None = None

    @classmethod
    def of(cls, health: EngineHealth, pids: dict[str, int], num_requests: int) -> ReplicaHealth:
        """The one replica of an engine without a fleet."""
        return cls(
            number=0,
            state=health.state,
            pids=pids,
            num_requests=num_requests,
            actors=health.actors,
            num_recoveries=health.num_recoveries,
            recovery_s=health.recovery_s,
            last_failure=health.last_failure,
        )


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """An engine."""

    state: EngineState
    actors: dict[str, ActorHealth] = field(default_factory=dict)
    num_recoveries: int = 0
    """Times that something died and ran again."""
    recovery_s: float = 0.0
    """From the deaths until everything was linked and ran again, added up."""
    last_failure: str | None = None
    """The last death of any actor."""
    replicas: list[ReplicaHealth] = field(default_factory=list)
    """Every replica, by number."""
    threads: dict[str, ThreadHealth] = field(default_factory=dict)
    """"intake": they read prompts. Of an engine that its caller steps there are none."""
