"""The wiring as data: which actors there are, where each runs, and which of them are linked.

A Topology is checked when it is built and never changes. `engine_topology` gives the engine's own; tests and other
programs build theirs from the same two specs. Read by the supervisor, which makes it real.

    process   frontend (owner) ── scheduler ══ worker0 … worker(N-1)          every actor but the frontend a process
    inline    frontend (owner) ── scheduler (owner) ══ worker0 … (threads)    one process, links in memory

── is a pair, ══ a broadcast: one plan for all workers, and what each worker answers apart.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actorllm.actors.link import LinkInfo
from actorllm.config import EngineConfig
from actorllm.ring.channel import DEFAULT_CAPACITY, RESULT_CAPACITY

Placement = Literal["owner", "process", "thread", "attached"]


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """One actor of a topology."""

    name: str
    path: str
    """The class, as "package.module:Class"."""
    rank: int = 0
    placement: Placement = "process"
    """owner: on the engine thread's loop; thread: on a loop and thread of its own; process: in a process of its own;
    attached: in another program, which comes and goes as it likes (never in a Topology)."""
    environment: str | None = None
    """A function `(config) -> dict[str, str]`, as "package.module:function": variables that must be set before the
    process starts. Called in the owner, so its module must be a light one."""
    preload: tuple[str, ...] = ()
    """Modules that its process imports first: one that is parked before it is needed (`Supervisor`, standby)."""
    group: str | None = None
    """Actors of one group are killed and started again together when one of them dies; None: this one alone."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link: a hub with one spoke (a pair), or a broadcast with any number. Use `pair` and `broadcast`."""

    name: str
    hub: str
    spokes: tuple[str, ...]
    is_broadcast: bool
    capacity_down: int = DEFAULT_CAPACITY
    """Bytes of the ring from the hub to the spokes."""
    capacity_up: int = DEFAULT_CAPACITY
    """Bytes of the ring from each spoke to the hub."""

    @classmethod
    def pair(
        cls, hub: str, spoke: str, *, capacity_down: int = DEFAULT_CAPACITY, capacity_up: int = DEFAULT_CAPACITY
    ) -> LinkSpec:
        """Each end is a plain Link, known to its actor under the name of the other."""
        return cls(f"{hub}-{spoke}", hub, (spoke,), False, capacity_down, capacity_up)

    @classmethod
    def broadcast(
        cls,
        name: str,
        hub: str,
        spokes: Sequence[str],
        *,
        capacity_down: int = DEFAULT_CAPACITY,
        capacity_up: int = RESULT_CAPACITY,
    ) -> LinkSpec:
        """The hub has a Broadcast, known to it under `name`; each spoke has a plain Link, known to it as the hub."""
        return cls(name, hub, tuple(spokes), True, capacity_down, capacity_up)

    @property
    def ends(self) -> tuple[str, ...]:
        """The names of the actors: the hub, then the spokes."""
        return (self.hub, *self.spokes)

    def infos(self, rank_of: dict[str, int], generation: int) -> list[LinkInfo]:
        """What each of `ends` is to know."""
        from_hub = [
            LinkInfo(self.name, spoke, rank_of[spoke], generation, index) for index, spoke in enumerate(self.spokes)
        ]
        hub = (
            LinkInfo(self.name, self.name, 0, generation, spokes=tuple(from_hub)) if self.is_broadcast else from_hub[0]
        )
        to_hub = [
            LinkInfo(self.name, self.hub, rank_of[self.hub], generation, index) for index in range(len(self.spokes))
        ]
        return [hub, *to_hub]


@dataclass(frozen=True, slots=True)
class Topology:
    """Actors and links. Raises ValueError when they do not fit together."""

    actors: tuple[ActorSpec, ...]
    links: tuple[LinkSpec, ...]

    def __post_init__(self) -> None:
        names = [actor.name for actor in self.actors]
        if len(set(names)) != len(names):
            raise ValueError(f"two actors of one name: {names}")
        if len({link.name for link in self.links}) != len(self.links):
            raise ValueError(f"two links of one name: {[link.name for link in self.links]}")
        for link in self.links:
            if not link.spokes or set(link.ends) - set(names) or len(set(link.ends)) != len(link.ends):
                raise ValueError(f"link {link.name!r} joins {link.ends}; the actors are {names}")
            places = {self.actor(end).placement for end in link.ends}
            if {"process", "thread"} <= places:
                raise ValueError(f"link {link.name!r} joins a thread of the owner with another process")

    def actor(self, name: str) -> ActorSpec:
        for actor in self.actors:
            if actor.name == name:
                return actor
        raise KeyError(name)


def engine_topology(config: EngineConfig) -> Topology:
    """The engine: one frontend, one scheduler, `world_size` workers."""
    is_inline = config.topology == "inline"
    workers = [
        ActorSpec(
            name=f"worker{rank}",
            path="actorllm.actors.worker:WorkerActor",
            rank=rank,
            placement="thread" if is_inline else "process",
            preload=("actorllm.actors.worker", "actorllm.model.cpu.runner"),
            group="workers",  # what they compute together, none can leave alone
            environment="actorllm.model.threads:worker_environment",
        )
        for rank in range(config.num_workers)
    ]
    return Topology(
        actors=(
            ActorSpec("frontend", "actorllm.actors.frontend:FrontendActor", placement="owner"),
            ActorSpec(
                "scheduler",
                "actorllm.actors.scheduler:SchedulerActor",
                placement="owner" if is_inline else "process",
                preload=("actorllm.actors.scheduler",),
            ),
            *workers,
        ),
        links=(
            LinkSpec.pair("scheduler", "frontend"),
            LinkSpec.broadcast("workers", "scheduler", [worker.name for worker in workers]),
        ),
    )


ATTACHED = "attached"
"""What the names of attached frontends begin with."""


def attached_frontend(number: int) -> tuple[ActorSpec, LinkSpec]:
    """The number-th frontend that joined a named engine from outside, and its link."""
    spec = ActorSpec(f"{ATTACHED}{number}", "actorllm.actors.frontend:FrontendActor", placement="attached")
    return spec, LinkSpec.pair("scheduler", spec.name)


def load(path: str) -> Any:
    """What "package.module:name" names. Raises ImportError or AttributeError."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def path_of(cls: type[Any]) -> str:
    """The path under which `load` finds the class again in another process."""
    return f"{cls.__module__}:{cls.__qualname__}"
