"""`CacheMemory`: the KV caches of one process's engines share the memory of the machine.

The pages of a cache on a CPU are mapped when they are first written. A worker that starts later still measures them as
available. So the process that owns the engines records what each has for its cache, and fits the next cache into the rest.
This happens one engine after the other, however many start at once. A cache whose size is an argument is recorded and not
changed. A GPU's cache is allocated whole, and is not recorded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from actorllm.config import EngineConfig
from actorllm.model import memory

PidsOf = Callable[[], list[int]]


class HasPids(Protocol):
    """A supervisor, or what takes its place."""

    @property
    def pids(self) -> dict[str, int]: ...


def worker_pids_of(supervisor: HasPids) -> PidsOf:
    """Asks for its workers as long as it lives, and does not keep it alive: it knows the engine, that may be dropped."""
    kept = weakref.ref(supervisor)

    def pids() -> list[int]:
        supervisor = kept()
        of_actors = {} if supervisor is None else supervisor.pids
        return [pid for name, pid in of_actors.items() if name.startswith("worker")]

    return pids


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one engine has for its cache."""

    num_bytes: int
    pids: PidsOf
    """The processes that write it; none: this one."""
    resident_bytes: int
    """What they held before the first page was written."""

    @property
    def unwritten_bytes(self) -> int:
        """What is still measured as available. In this process nothing tells the cache from the rest: all of it."""
        pids = self.pids()
        written = max(0, _resident_bytes(pids) - self.resident_bytes) if pids else 0
        return max(0, self.num_bytes - written)


class CacheMemory:
    """See the module docstring. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reservations: weakref.WeakKeyDictionary[object, Reservation] = weakref.WeakKeyDictionary()

    def renew_lock(self) -> None:
        """In a fork: a thread that held it is not there."""
        self._lock = threading.Lock()

    def fit(self, owner: object, config: EngineConfig, facts: Mapping[str, Mapping[str, Any]], pids: PidsOf) -> int:
        """The number of KV blocks of an engine: of the rank with the least room, or fewer, beside the other engines' caches.

        owner: the engine, whose earlier reservation this replaces. facts: what the workers say of themselves.
        """
        ranks = {name: fact for name, fact in facts.items() if "num_blocks" in fact}
        num_blocks: int = min(fact["num_blocks"] for fact in ranks.values())
        here = {f"worker{rank}" for rank in range(config.ranks_per_machine)}
        block_bytes: int = sum(fact.get("block_bytes", 0) for name, fact in ranks.items() if name in here)
        if config.device != "cpu" or not block_bytes:  # or nothing is measured: a worker takes the place of another
            return num_blocks
        with self._lock:
            if config.cache.kv_cache_memory_bytes is None and config.cache.num_blocks_override is None:
                others = sum(one.unwritten_bytes for key, one in self._reservations.items() if key is not owner)
                share = memory.DEFAULT_CACHE_SHARE if config.cache.memory_utilization is None else 1.0
                room = int(max(0, memory.available_bytes() - others) * share) if others else num_blocks * block_bytes
                num_blocks = min(num_blocks, room // block_bytes)
            resident = _resident_bytes(pids())
            self._reservations[owner] = Reservation(num_blocks * block_bytes, pids, resident)
        return num_blocks

    def release(self, owner: object) -> None:
        """The engine has ended. Idempotent."""
        with self._lock:
            self._reservations.pop(owner, None)


def _resident_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += memory.resident_bytes(pid)
        except OSError:
            continue  # it has ended
    return total
