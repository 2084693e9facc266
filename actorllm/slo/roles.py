"""Prefill apart from decode in virtual time: replicas with roles, and what copying KV from one to another takes.

What decides is what decides live: the router (`scheduling.role_router.RoleRouter`), leases and loads (`scheduling.tiers`). Here is
what happens around them. A request whose prompt is computed leaves its replica, and goes on at the one that the router names.
That replica copies the blocks beside its steps, one request after the other, while the lease is there. `TransferShape` says what
that takes. Replicas do what is next in the order of time, so a lease ends when its reader has the blocks. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from actorllm.errors import ConfigError, shown
from actorllm.messages import I32, I64, U8, Submit
from actorllm.scheduling.role_router import RoleRouter
from actorllm.scheduling.router import ReplicaView, Routable
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key
from actorllm.scheduling.tiers.transfers import BlockLoad, BlockStore, Borrowed, Transfers
from actorllm.slo.failures import LostRequests, MortalReplica
from actorllm.slo.tiers import SimulatedTiers, TierMoves
from actorllm.types.objective import SLO
from actorllm.types.roles import Role


class ReplicaOfRole(MortalReplica, Protocol):
    """A replica with a role (`simulator.SimulatedReplica`)."""

    role: Role | None

    @property
    def next_event_at(self) -> float: ...

    def view(self, now: float) -> ReplicaView: ...
    def aborts_of(self, key: Key) -> list[float]: ...
    def abort_at(self, at: float, key: Key) -> None: ...


@dataclass(frozen=True, slots=True)
class TransferShape:
    """What a copy of KV from one replica to another takes. Raises ConfigError for values that make no sense."""

    block_s: float = 0.0
    """Seconds of a block."""
    latency_s: float = 0.0
    """Of each copy, whatever its size."""

    def __post_init__(self) -> None:
        for name in ("block_s", "latency_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"transfer: {name}={shown(value)} must be 0 seconds or more")


def read_transfer(given: str) -> TransferShape:
    """Of a command line: 'block_s' or 'block_s:latency_s'. Raises ConfigError."""
    try:
        return TransferShape(*map(float, given.split(":")))
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"kv_copy={given!r:.80} must be block_s, or block_s:latency_s, such as 2e-5:1e-3") from None


class SimulatedTable:
    """The leases of one replica (`scheduling.tiers.leases.LeaseTable`)."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._number = 0
        self._there: set[int] = set()
        self._taken: set[int] = set()
        self._renewed: set[int] = set()

    def grant(self, blocks: I32, digest: bytes, era: int) -> I64:
        self._number += 1
        self._there.add(self._number)
        return np.array([self._replica, 0, self._number, blocks.size], np.int64)

    def end(self, lease: I64) -> None:
        for known in (self._there, self._taken, self._renewed):
            known.discard(lease.item(2))

    def is_taken(self, lease: I64) -> bool:
        return lease.item(2) in self._taken

    def is_renewed(self, lease: I64) -> bool:
        is_renewed = lease.item(2) in self._renewed
        self._renewed.discard(lease.item(2))
        return is_renewed

    def clear(self) -> None:
        self._there.clear()

    def has(self, lease: I64) -> bool:
        """Whether a reader that looks finds this lease."""
        return lease.item(2) in self._there

    def take(self, lease: I64) -> None:
        """Its reader needs it no more."""
        if self.has(lease):
            self._taken.add(lease.item(2))

    def renew(self, lease: I64) -> None:
        """Its reader still wants it."""
        if self.has(lease):
            self._renewed.add(lease.item(2))


class RoleMoves(TierMoves):
    """As TierMoves, of a replica with a role."""

    def __init__(
        self, tiers: SimulatedTiers, scheduler: Callable[[], Scheduler], number: int, roles: SimulatedRoles
    ) -> None:
        super().__init__(tiers, scheduler)
        self._of_replica, self._roles = number, roles
        self._copied_until = -math.inf

    def before_plan(self, now: float) -> None:
        transfers = self._scheduler().transfers
        assert transfers is not None
        if transfers.leases is not None:
            for offer in list(transfers.leases.new_offers(now)):
                self._roles.offer(self._of_replica, offer.key, offer.lease, now)
        super().before_plan(now)
        while transfers.given_back:
            self._roles.take(transfers.given_back.pop())
        for lease in transfers.renewals(now):
            self._roles.renew(lease)

    def begin(self, job: BlockLoad | BlockStore, now: float) -> tuple[int, float, float]:
        if not isinstance(job, BlockLoad) or job.source is None:
            return super().begin(job, now)
        shape = self._roles.transfer
        seconds = shape.latency_s + job.blocks.size * shape.block_s
        self._copied_until = max(now, self._copied_until) + seconds
        return job.blocks.size, seconds, self._copied_until

    def end(self, transfers: Transfers, job: BlockLoad | BlockStore, number: int, seconds: float, now: float) -> None:
        if isinstance(job, BlockLoad) and job.source is not None:
            number = self._roles.copied(job.source, number, now)
        super().end(transfers, job, number, seconds, now)


class SimulatedRoles(LostRequests):
    """See the module docstring."""

    def __init__(self, roles: Sequence[Role], transfer: TransferShape, router: RoleRouter) -> None:
        super().__init__()
        self.roles = tuple(roles)
        self.transfer = transfer
        self.tables = [SimulatedTable(number) if role == "prefill" else None for number, role in enumerate(roles)]
        self.num_handed_off = 0
        self.router = router
        self._replicas: Sequence[ReplicaOfRole] = ()
        self._moved: Callable[[int, int, float], None]
        self._offered: dict[tuple[int, int], float] = {}

    def begin(self, replicas: Sequence[ReplicaOfRole], moved: Callable[[int, int, float], None]) -> None:
        """moved: hears which request goes on at which replica, by their numbers, and when."""
        self._replicas, self._moved = replicas, moved
        for replica, role in zip(replicas, self.roles, strict=True):
            replica.role = role
            transfers = replica.scheduler.transfers
            if transfers is not None and transfers.leases is not None:
                transfers.leases.era = 0

    def run_until(self, until: float) -> None:
        """All that happens at all replicas before this time, in its order."""
        while True:
            replica = min(self._replicas, key=lambda one: one.next_event_at)
            if replica.next_event_at >= until:
                return
            replica.run_until(min(until, math.nextafter(replica.next_event_at, math.inf)))

    def offer(self, number: int, key: Key, lease: I64, at: float) -> None:
        """The prompt of a request is computed: it goes on elsewhere."""
        source = self._replicas[number]
        request = source.scheduler.sequence(key)
        assert request is not None
        submit = replace(self.as_sent_again(request, source.scheduler), hands_off=False, kv_lease=lease)
        targets = [one for one, role in zip(self._replicas, self.roles, strict=True) if role != "prefill"]
        chosen = self.router.route_on(_routable_of(submit), [one.view(at) for one in targets])
        aborts = source.aborts_of(key)
        source.take_out(key, at)
        target = self._replicas[chosen]
        self._moved(submit.rid, chosen, at)
        self._offered[number, lease.item(2)] = at
        self.num_handed_off += 1
        target.submit(0, submit, at)
        for when in aborts:
            target.abort_at(max(when, at), key)

    def copied(self, source: Borrowed, number: int, now: float) -> int:
        """How many blocks of a copy that has just ended count."""
        replica, _, lease = source.lease.tolist()
        table = self.tables[replica]
        began = self._offered.pop((replica, lease), None)
        if began is not None:
            self.router.hand_off.observe(number, now - began)
        return number if table is not None and table.has(source.lease) else 0

    def take(self, lease: I64) -> None:
        table = self.tables[lease.item(0)]
        if table is not None:
            table.take(lease)

    def renew(self, lease: I64) -> None:
        table = self.tables[lease.item(0)]
        if table is not None:
            table.renew(lease)


def hashes_of_its_own(number: int, num_blocks: int) -> U8:
    """Of a prompt that begins like no other: 32 bytes for each block."""
    words = np.zeros((num_blocks, 4), np.uint64)
    words[:, 0] = (np.uint64(number << 20) + np.arange(num_blocks, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    words[:, 1], words[:, 2] = number + 1, np.arange(num_blocks)
    return words.view(np.uint8).reshape(-1)


def _routable_of(submit: Submit) -> Routable:
    slo = None if submit.slo is None else SLO.from_fields(submit.slo)
    return Routable(submit.prompt.size, submit.block_hashes.tobytes(), max_tokens=submit.max_tokens, slo=slo)
