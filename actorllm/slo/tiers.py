"""KV tiers in virtual time: what an engine keeps of its KV in host memory or on a disk, and what moving it takes.

The scheduler decides by the same object as live (`scheduling.tiers.Transfers`): stores, loads, and which requests wait.
A `TierShape` says how many blocks a tier holds and what moving one takes. A block is stored in every tier and loaded from the
first that has it. Each tier forgets what was used longest ago. One load is read at a time, and one store is written at a time,
beside the steps. Replicas have tiers of their own. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actorllm.errors import ConfigError, shown
from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.tiers.transfers import BlockLoad, BlockStore, Transfers


@dataclass(frozen=True, slots=True)
class TierShape:
    """One tier. Raises ConfigError for values that make no sense."""

    num_blocks: int
    load_s: float
    """Seconds of a block."""
    store_s: float
    """Likewise."""
    latency_s: float = 0.0
    """Of a load, whatever its size."""

    def __post_init__(self) -> None:
        if isinstance(self.num_blocks, bool) or not isinstance(self.num_blocks, int) or self.num_blocks < 1:
            raise ConfigError(f"tier: num_blocks={shown(self.num_blocks)} must be 1 block or more")
        for name in ("load_s", "store_s", "latency_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"tier: {name}={shown(value)} must be 0 seconds or more")


def read_tiers(given: Sequence[str]) -> tuple[TierShape, ...]:
    """Of a command line: 'blocks:load_s:store_s' or 'blocks:load_s:store_s:latency_s' for each tier, the fastest first."""
    tiers = []
    for text in given:
        parts = text.split(":")
        try:
            if len(parts) not in (3, 4):
                raise ValueError
            tiers.append(TierShape(int(parts[0]), *map(float, parts[1:])))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"kv_tiers={text!r:.80} must be blocks:load_s:store_s, or with :latency_s, such as 50000:2e-5:2e-5"
            ) from None
    return tuple(tiers)


class SimulatedTiers:
    """What the tiers of one replica have: a `Directory`."""

    def __init__(self, tiers: Sequence[TierShape]) -> None:
        self.tiers = tuple(tiers)
        self._blocks: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in tiers]
        """Of each tier, the hashes of its blocks; those that were used last stand last."""

    def count(self, hashes: bytes) -> int:
        for at, one in enumerate(_each(hashes)):
            if not any(one in blocks for blocks in self._blocks):
                return at
        return len(hashes) // HASH_BYTES

    def missing(self, hashes: bytes) -> list[bool]:
        return [any(one not in blocks for blocks in self._blocks) for one in _each(hashes)]

    def remove(self, hashes: bytes) -> None:
        for one in _each(hashes):
            for blocks in self._blocks:
                blocks.pop(one, None)

    def forget_all(self) -> None:
        for blocks in self._blocks:
            blocks.clear()

    def load(self, hashes: bytes) -> tuple[int, float]:
        """How many of these there are without a gap, and the seconds that reading them takes."""
        number = self.count(hashes)
        seconds = 0.0
        used: set[int] = set()
        for one in _each(hashes)[:number]:
            first = next(at for at, blocks in enumerate(self._blocks) if one in blocks)
            self._blocks[first].move_to_end(one)
            seconds += self.tiers[first].load_s
            used.add(first)
        return number, seconds + sum(self.tiers[at].latency_s for at in used)

    def store(self, hashes: bytes) -> None:
        """They are in every tier now."""
        for tier, blocks in zip(self.tiers, self._blocks, strict=True):
            for one in _each(hashes):
                blocks[one] = None
                blocks.move_to_end(one)
            while len(blocks) > tier.num_blocks:
                blocks.popitem(last=False)

    def store_s(self, num_blocks: int) -> float:
        """The slowest tier counts: they are written side by side."""
        return num_blocks * max(tier.store_s for tier in self.tiers)


def _each(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


class TierMoves:
    """Moves blocks beside the steps of one replica, as the scheduler decides (`simulator.Aside`)."""

    def __init__(self, tiers: SimulatedTiers, scheduler: Callable[[], Scheduler]) -> None:
        """scheduler: that of the time; another one takes its place after a failure."""
        self._tiers = tiers
        self._scheduler = scheduler
        self._moves: list[tuple[float, int, Transfers, BlockLoad | BlockStore, int, float]] = []
        """By their end: the scheduler's transfers, the job, how many blocks are good, and the seconds that it took."""
        self._number = 0
        self._read_until = self._written_until = -math.inf

    @property
    def next_at(self) -> float:
        """When the next move is done."""
        return self._moves[0][0] if self._moves else math.inf

    @property
    def next_deadline(self) -> float:
        """When a request has waited long enough for a load."""
        transfers = self._scheduler().transfers
        return math.inf if transfers is None else transfers.next_deadline

    def before_plan(self, now: float) -> None:
        """Begin what is to be moved."""
        scheduler = self._scheduler()
        transfers = scheduler.transfers
        if transfers is None:
            return
        for job in transfers.next(now, scheduler.is_idle):
            number, seconds, end = self.begin(job, now)
            self._number += 1
            heapq.heappush(self._moves, (end, self._number, transfers, job, number, seconds))

    def begin(self, job: BlockLoad | BlockStore, now: float) -> tuple[int, float, float]:
        """How many blocks of a job will be good, the seconds that it takes, and when it is done."""
        if isinstance(job, BlockLoad):
            number, seconds = self._tiers.load(job.wanted)
            self._read_until = max(now, self._read_until) + seconds
            return number, seconds, self._read_until
        seconds = self._tiers.store_s(job.blocks.size)
        self._written_until = max(now, self._written_until) + seconds
        return job.blocks.size, seconds, self._written_until

    def happen(self) -> float:
        """Let the next move be done. Returns when it is."""
        now, _, transfers, job, number, seconds = heapq.heappop(self._moves)
        self.end(transfers, job, number, seconds, now)
        return now

    def end(self, transfers: Transfers, job: BlockLoad | BlockStore, number: int, seconds: float, now: float) -> None:
        """A job is done."""
        if isinstance(job, BlockLoad):
            transfers.loaded(job, number, seconds, now)
        else:
            self._tiers.store(job.hashes)
            transfers.stored(job, number, seconds)
