"""`Group`: the actors that the supervisor kills and starts again together, and where such a restart stands.

The workers compute one model together and wait for each other in every step. None of them can be replaced alone, so they
are one group. Any other process is a group of its own. Plain state of the supervisor.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import anyio

from actorllm.actors.topology import ActorSpec, Topology
from actorllm.supervision.death import ActorDeath


@dataclass(slots=True, eq=False)
class Group:
    """Processes that live and die together."""

    name: str
    specs: tuple[ActorSpec, ...]
    is_restarting: bool = False
    num_restarts: int = 0
    fell_at: float = 0.0
    """When the death was seen that the restart under way, or the last one, followed."""
    restart: anyio.CancelScope | None = None
    attempt: anyio.CancelScope | None = None
    """Of the restart: set while new processes start, which can die, too."""
    death: ActorDeath | None = None
    """The first death of the attempt."""
    last_deaths: dict[str, ActorDeath] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    def note(self, death: ActorDeath) -> None:
        self.last_deaths[death.actor] = death

    def fell_again(self, death: ActorDeath) -> None:
        """One of it died in the middle of a restart: of its own, or killed together with the others."""
        if self.attempt is not None and self.death is None:
            self.note(death)
            self.death = death
            self.attempt.cancel()

    def log_fields(self, event: str, **more: Any) -> dict[str, Any]:
        """What a log record about it carries beside its text."""
        return {"event": event, "group": self.name, "actors": self.names, "num_restarts": self.num_restarts, **more}

    def __str__(self) -> str:
        return f"{', '.join(self.names)} {'is' if len(self.specs) == 1 else 'are'}"


def groups_of(topology: Topology) -> dict[str, Group]:
    """The group of every process, by the names of its actors."""
    members: dict[str, list[ActorSpec]] = defaultdict(list)
    for spec in topology.actors:
        if spec.placement == "process":
            members[spec.group or spec.name].append(spec)
    groups = [Group(name, tuple(specs)) for name, specs in members.items()]
    return {name: group for group in groups for name in group.names}
