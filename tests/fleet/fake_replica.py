"""A replica without processes, for tests of what routes and moves requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from actorllm.fleet.dispatcher import Dispatcher
from actorllm.fleet.replica import ReplicaFrontend
from actorllm.messages import Abort, Submit, sequences_of
from actorllm.scheduling.router import LearntSteps, LinearSteps, RoundRobin, Router
from tests.actors.scheduler_bench import FakeLink

END = [0, "length", None, None, 0.0, None, None, None, 0, 0, 0, 0, 0.0]
"""Of the request in the first row, as a scheduler tells it."""
STEPS = LinearSteps((0.001, 0.0001, 0.0, 0.0))
"""A step of 100 tokens takes 11 ms."""
LEARNT = LearntSteps(STEPS.weights, (1000.0, 0.0, 0.0, 0.0))


@dataclass
class FakeSupervisor:
    state: str = "running"


@dataclass
class FakeReplica:
    """What a dispatcher sees of a replica, over a link that records."""

    number: int
    frontend: ReplicaFrontend
    link: FakeLink | None = None
    supervisor: FakeSupervisor = field(default_factory=FakeSupervisor)
    is_removed: bool = False
    limits: dict[str, Any] = field(default_factory=dict)
    is_draining: bool = False
    is_leaving: bool = False
    is_lost: bool = False
    num_links: int = 0
    told: Counter[int] = field(default_factory=Counter)
    """How many ends its scheduler has told of each request that it was told to end."""
    find: None = None
    clock_offset_s: float = 0.0
    steps: LearntSteps | None = None
    """What it has learnt."""

    @property
    def state(self) -> str:
        return "lost" if self.is_lost else self.supervisor.state

    @property
    def takes_requests(self) -> bool:
        return not (self.is_draining or self.is_leaving or self.is_lost or self.is_removed)

    def load(self) -> tuple[int, LearntSteps] | None:
        return None if self.steps is None else (1000, self.steps)

    def connect(self) -> None:
        self.num_links += 1
        self.link = FakeLink("scheduler")
        self.link.generation = self.num_links
        self.told.clear()
        self.frontend.on_link(self.link)  # type: ignore[arg-type]

    def known(self) -> dict[int, Submit]:
        """What its scheduler works on: all that it was told and was not told to end."""
        alive: dict[int, Submit] = {}
        for message in [] if self.link is None else self.link.sent:
            if isinstance(message, Submit):
                alive |= {one.rid: one for one in sequences_of(message)}
            elif isinstance(message, Abort):
                for rid in message.rids.tolist():
                    alive.pop(rid, None)
        return alive

    def num_ends_due(self, rid: int) -> int:
        """How many ends its scheduler has yet to tell of a request: it tells one for each time that it was told to end it."""
        has_it, num_ended = False, 0
        for message in [] if self.link is None else self.link.sent:
            if isinstance(message, Submit):
                has_it |= rid == message.rid or rid in message.siblings
            elif isinstance(message, Abort) and has_it and rid in message.rids:
                has_it, num_ended = False, num_ended + 1
        return num_ended - self.told[rid]


def new_fleet(num_replicas: int = 2, router: Router | None = None) -> tuple[Dispatcher, list[FakeReplica]]:
    """Replicas that are connected, and the dispatcher that moves requests between them."""
    replicas: dict[int, Any] = {}
    dispatcher = Dispatcher(replicas, router or RoundRobin())
    for number in range(num_replicas):
        frontend = ReplicaFrontend(dispatcher.next_rid, lambda entries, error: None)
        limits = {"max_num_batched_tokens": 2048}
        replicas[number] = FakeReplica(number, frontend, limits=limits, steps=LEARNT)
        replicas[number].connect()
    return dispatcher, [*replicas.values()]
