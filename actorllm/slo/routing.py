"""Routers: which replica a request goes to, from views of the replicas that may be old.

Real routers see the state of a moment ago; `simulate(view_interval_s=...)` says how long ago. A router that acts on what it
has done itself meanwhile keeps count of that, as these do where it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actorllm.errors import ConfigError, nearest_name
from actorllm.slo.workload import Workload, seed_stream


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a router knows of a replica."""

    number: int
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of its KV blocks in use."""
    seen: float
    """When it was like this, in seconds of the run."""

    @property
    def load(self) -> int:
        return self.num_running + self.num_waiting


class Router(Protocol):
    @property
    def needs_views(self) -> bool:
        """Whether `route` looks at the views; without, they may be empty."""
        ...

    def route(self, workload: Workload, row: int, views: Sequence[ReplicaView]) -> int:
        """The number of the replica that request `row` of the workload goes to. views: the same object until they are new."""
        ...


class RoundRobin:
    """One after the other."""

    needs_views = False

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        self._num = num_replicas
        self._next = 0

    def route(self, workload: Workload, row: int, views: Sequence[ReplicaView]) -> int:
        number = self._next
        self._next = (number + 1) % self._num
        return number


class _Counted:
    """Load as seen, plus what was sent there since: without the latter, a stale view sends all requests to one replica."""

    needs_views = True

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        self._num = num_replicas
        self._sent = [0] * num_replicas
        self._views: Sequence[ReplicaView] = ()

    def _loads(self, views: Sequence[ReplicaView]) -> list[int]:
        if (
            views is not self._views
        ):  # not by when they were made: exact ones are new for each of several at one instant
            self._views = views
            self._sent = [0] * self._num
        return [view.load + sent for view, sent in zip(views, self._sent, strict=True)]


class LeastLoad(_Counted):
    """Where the fewest requests run and wait."""

    def route(self, workload: Workload, row: int, views: Sequence[ReplicaView]) -> int:
        loads = self._loads(views)
        number = loads.index(min(loads))
        self._sent[number] += 1
        return number


class PowerOfTwo(_Counted):
    """The less loaded of two drawn at random (Mitzenmacher 2001): nearly as good, and stale views do less harm."""

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        super().__init__(num_replicas)
        self._rng = seed_stream(seed, "power of two")

    def route(self, workload: Workload, row: int, views: Sequence[ReplicaView]) -> int:
        loads = self._loads(views)
        first, second = (int(i) for i in self._rng.integers(0, self._num, 2))
        number = first if loads[first] <= loads[second] else second
        self._sent[number] += 1
        return number


class PrefixAware(_Counted):
    """To the replica that has the longest part of the prompt's prefix, unless it is much busier than the least busy one.

    It remembers where it sent which prefix ids, as the router of SGLang does; what was evicted there it does not know.
    """

    imbalance = 1.5
    slack = 4
    """Too busy: a load over imbalance times the least one, plus slack."""

    def __init__(self, num_replicas: int, seed: int = 0) -> None:
        super().__init__(num_replicas)
        self._home: dict[int, int] = {}  # prefix id -> the replica that was last sent it

    def route(self, workload: Workload, row: int, views: Sequence[ReplicaView]) -> int:
        loads = self._loads(views)
        number = least = loads.index(min(loads))
        ids = workload.prefixes.of(row).tolist() if workload.prefixes is not None else []
        for prefix in reversed(ids):
            home = self._home.get(prefix)
            if home is not None:
                if loads[home] <= self.imbalance * loads[least] + self.slack:
                    number = home
                break
        for prefix in ids:
            self._home[prefix] = number
        self._sent[number] += 1
        return number


ROUTERS: dict[str, Callable[[int, int], Router]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "prefix-aware": PrefixAware,
}


def make_router(name: str, num_replicas: int, seed: int = 0) -> Router:
    """Raises ConfigError naming the nearest router."""
    if name not in ROUTERS:
        raise ConfigError(f"there is no router {name!r}{nearest_name(name, ROUTERS)}; there are {', '.join(ROUTERS)}")
    return ROUTERS[name](num_replicas, seed)
