"""Requests that move between replicas while they run or wait, in virtual time, by the freeness of Llumnix (Sun et al., OSDI 2024).

The freeness of a replica is how many more steps its memory lasts: (free tokens - prompt tokens that wait) / rows that run. Once a
period, requests go from the least free replica, if it is below `low`, to the freest one, if it is above `high`.

What differs from Llumnix: there the KV is copied while the request decodes. Here a request that runs is sent again as after a
failure, so the other replica computes its KV again from its tokens. Requests that wait have none, so they move first. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actorllm.errors import ConfigError, shown
from actorllm.messages import Submit
from actorllm.scheduling.sequence import Sequence as Request
from actorllm.scheduling.sequence import State
from actorllm.slo.failures import LostRequests, MortalReplica


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """When requests move. Raises ConfigError for values that make no sense."""

    period_s: float = 0.5
    low: float = 30.0
    """Steps that the memory of a replica lasts, below which requests leave it."""
    high: float = 60.0
    """Above which a replica takes them."""
    most: int = 4
    """Requests that move at a time."""
    moves_running: bool = True
    """Also those that run, whose KV is computed again."""

    def __post_init__(self) -> None:
        if not 0 < self.period_s < math.inf:
            raise ConfigError(f"rescheduling: period_s={shown(self.period_s)} must be more than 0 seconds")
        if not self.low <= self.high:
            raise ConfigError(f"rescheduling: low={shown(self.low)} must be at most high={shown(self.high)}")
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise ConfigError(f"rescheduling: most={shown(self.most)} must be 1 request or more")


class Move(NamedTuple):
    """A request went from one replica to another."""

    at: float
    number: int
    """Of the request."""
    source: int
    target: int
    num_tokens: int
    """Whose KV is computed again; 0: it had not started."""


class Rescheduler(LostRequests):
    """See the module docstring. route: sends a request on to one of these replicas (number, submit, replicas, at)."""

    def __init__(
        self,
        rules: Rescheduling,
        replicas: Sequence[MortalReplica],
        route: Callable[[int, Submit, list[int], float], None],
    ) -> None:
        super().__init__()
        self.moves: list[Move] = []
        self.next_at = rules.period_s
        self.is_waiting = False
        self._rules = rules
        self._replicas = replicas
        self._route = route

    def up(self) -> list[int]:
        """All take requests."""
        return list(range(len(self._replicas)))

    def hold(self, number: int, submit: Submit) -> None:
        raise AssertionError("no replica is down")

    def apply(self) -> None:
        """Look at all replicas, and move what is to move."""
        at = self.next_at
        self.next_at += self._rules.period_s
        for replica in self._replicas:
            replica.run_until(at)
        for _ in range(self._rules.most):
            free = [freeness(replica) for replica in self._replicas]
            source, target = free.index(min(free)), free.index(max(free))
            if source == target or free[source] >= self._rules.low or free[target] <= self._rules.high:
                return
            request = self._choose(self._replicas[source])
            if request is None:
                return
            submit = self.as_sent_again(request, self._replicas[source].scheduler)
            has_started = request.state is State.RUNNING
            num_tokens = submit.prompt.size + submit.output.size if has_started else 0
            # The route asks where the request was, for when its client gives up.
            self._replicas[source].take_out(request.key, at)
            self._route(submit.rid, submit, [target], at)
            self.moves.append(Move(at, submit.rid, source, target, num_tokens))

    def _choose(self, replica: MortalReplica) -> Request | None:
        """The last one that waits and has not started; else the shortest one that decodes. None: only one is there."""
        scheduler = replica.scheduler
        waiting = [one for one in scheduler.waiting() if not one.has_started]
        if waiting:
            return max(waiting, key=lambda one: (-one.submit.priority, one.arrival_index))
        if not self._rules.moves_running:
            return None
        known = scheduler.batch.num_known
        decoding = [one for one in scheduler.running() if one not in scheduler.prefilling]
        if len(decoding) < 2:
            return None
        return min(decoding, key=lambda one: (int(known[one.slot]), -one.arrival_index))


def freeness(replica: MortalReplica) -> float:
    """Steps for which the memory of a replica lasts; negative if less is free than the prompts that wait take."""
    scheduler = replica.scheduler
    waiting = sum(one.submit.prompt.size for one in scheduler.waiting())
    return (scheduler.kv.num_free * scheduler.kv.block_size - waiting) / max(1, len(scheduler.running()))
