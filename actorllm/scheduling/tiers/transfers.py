"""`Transfers`: which KV blocks are stored in a tier, which are loaded from one, and which requests wait for a load.

*Stores.* A block is worth storing once a request has taken it over, or a request that was preempted will want it again. It is
stored when its eviction is near, or when there is nothing to compute. Meanwhile it is held (`KVCacheManager.hold`), so a thread
beside the steps can read it. No step waits for that. One store is under way at a time, of a bounded number of blocks, and only
out of blocks that nothing else needs now.

*Loads.* A request that would wait for a slot waits for a load instead, if a tier has blocks behind those that memory has.
Loading them must be predicted to take less time than computing. Its blocks are reserved, filled, and published in the prefix
cache. After that the request waits for a slot like any other, and finds them there. Of several requests that want one run of
blocks the first loads it; the others find it, too. Preempted requests come first, then priority and arrival decide. A request
waits for no longer than computing would take. A load that fails, or finds less than was promised, makes its requests compute.

Blocks that are reserved may be those of a request that has just ended, and steps that are under way may still write to them. So
they are filled once every step that was launched before is answered, also those that are void.

*Hand-offs.* A request that another replica has computed the prompt of comes with a lease on its blocks there (`leases`). It is
loaded in the same way, from the memory of that replica. The lease is renewed for as long as the request waits for the copy, or for
something else before that. Where there is no room for the blocks, the request waits longer than computing would take: it could
not be computed either. The first that lacks room keeps it from those behind. A lease that is over costs a prompt that is computed
here.

What was forgotten (`PrefixCache.forget`, `reset`) while a transfer was under way is not published, and is removed from the
tiers. Leases of it end.

Pure: what is to be moved is returned by `next`, and the caller says what became of it. Invariants (`check_integrity`): a
request that waits for a load is blocked or preempted. The blocks of every transfer under way are held. Owned by Scheduler.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actorllm.kvcache.manager import KVCacheManager
from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.messages import I32, I64
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.ledger import Ledger, StepRecord
from actorllm.scheduling.prefix_cache import PrefixCache
from actorllm.scheduling.sequence import FINISHED, Sequence, State
from actorllm.scheduling.telemetry.statistics import TransferStatistics
from actorllm.scheduling.tiers.leases import RENEWAL_S, Leases, LeaseTable
from actorllm.scheduling.tiers.transfer_costs import TransferCosts

MAX_LOADS = 2
"""Under way at a time: one is read while the next one's way to the worker is spent."""
MAX_PULLS = 8
"""Copies out of the memory of other replicas that are under way at a time. They take little beside the steps that they wait for."""
MAX_STUCK = 16
"""Requests that cannot be loaded yet are looked at up to so many, in their order; the others wait behind them."""
MAX_WAIT_S = 30.0
"""How long a request waits for a load while nothing is known of what computing takes."""
MIN_PULL_WAIT_S = 0.25
"""How long one waits for a copy at least. Before it stands what steps under way take, which a small model computes a prompt in."""
ROOM_PATIENCE = 10.0
"""A request with a lease waits for room up to so many times as long as for the copy, and for no longer than MAX_WAIT_S."""
MAX_URGENT = 64
"""Preempted requests whose blocks are to be stored; of more, the oldest are left to chance."""
LOOK_AHEAD = 8
"""How many stores ahead of the next eviction blocks are looked at."""


class Directory(Protocol):
    """What the tiers have, by block hashes (HASH_BYTES each, concatenated)."""

    def count(self, hashes: bytes) -> int:
        """How many of these they have, from the first on, without a gap."""

    def missing(self, hashes: bytes) -> list[bool]:
        """Of each of these, whether it is worth storing."""

    def remove(self, hashes: bytes) -> None:
        """What they have of these is wrong."""

    def forget_all(self) -> None:
        """Nothing that they have now is found any more."""


class NoTiers:
    """A directory of nothing: KV comes from other replicas alone."""

    def count(self, hashes: bytes) -> int:
        return 0

    def missing(self, hashes: bytes) -> list[bool]:
        return [False] * (len(hashes) // HASH_BYTES)

    def remove(self, hashes: bytes) -> None: ...
    def forget_all(self) -> None: ...


@dataclass(slots=True, eq=False)
class Borrowed:
    """What a request may take of another replica's memory."""

    lease: I64
    num_blocks: int
    """That the lease has: the first ones of the prompt."""
    digest: bytes = b""
    """The hash of the last of them, as the request has it."""


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks that are being filled."""

    hashes: bytes
    """Of the first blocks of a sequence, up to the last one that is loaded."""
    found: I32
    """Those of them that memory had."""
    blocks: I32
    """Those that are filled, behind the former."""
    began: float
    is_void: bool = False
    """Everything was forgotten meanwhile."""
    source: Borrowed | None = None
    """Where they are copied from; None: a tier."""
    after: int = 0
    """The last step that may still write to them."""
    is_begun: bool = False

    @property
    def wanted(self) -> bytes:
        """The hashes of the blocks that are filled."""
        return self.hashes[HASH_BYTES * self.found.size :]


@dataclass(slots=True, eq=False)
class BlockStore:
    """Blocks that are being written to the tiers."""

    hashes: bytes
    blocks: I32
    is_void: bool = False


@dataclass(slots=True)
class LoadWait:
    """Of a request, for a load."""

    patience_s: float
    """How long it waits at most."""
    until: float = math.inf
    """Until when, once there are workers that could load."""
    room_until: float = math.inf
    """Until when at most, if it is for want of room that a copy is not begun."""
    is_held_up: bool = False
    """The copy could not be begun when it was looked at last: the time since then does not count."""

    def is_over(self, now: float) -> bool:
        """Whether it has lasted long enough. Asked whenever loads are looked at."""
        if self.until == math.inf:
            self.until = now + self.patience_s
            self.room_until = now + min(MAX_WAIT_S, ROOM_PATIENCE * self.patience_s)
        elif self.is_held_up:
            self.until = max(self.until, min(now + self.patience_s, self.room_until))
        self.is_held_up = False
        return now >= self.until


class Transfers:
    """See the module docstring."""

    def __init__(
        self,
        directory: Directory,
        kv: KVCacheManager,
        cache: PrefixCache,
        batch: Batch,
        ledger: Ledger,
        go_on: Callable[[Sequence], None],
        num_wanted: Callable[[], int],
        *,
        max_load_blocks: int = 256,
        max_store_blocks: int = 64,
        lends: LeaseTable | None = None,
    ) -> None:
        """lends: where other replicas see what they may copy of this one; None: nothing. go_on: what becomes of a request that
        waits for no load any more. It may ask `holds` again, and is told no once. num_wanted: blocks that should
        be free, else leases give way."""
        if kv.index is None:
            raise ValueError("tiers keep what a prefix cache finds, and there is none")
        self._directory = directory
        self._kv, self._index = kv, kv.index
        self._cache = cache
        self._batch = batch
        self._ledger = ledger
        self._last_answered = self._last_void = 0
        self._go_on = go_on
        self._num_wanted = num_wanted
        self._max_load = max_load_blocks
        # Blocks that are held are missing elsewhere: a small part of the pool.
        self._max_store = max(1, min(max_store_blocks, kv.pool.num_blocks // 16))
        self.leases = None if lends is None else Leases(lends, kv, batch)
        """What other replicas copy; None: nothing."""
        self._borrowed: dict[Sequence, Borrowed] = {}
        self._kept: dict[Sequence, I64] = {}
        """The leases of requests here that have not copied the blocks yet, whatever they wait for."""
        self._num_keepers: Counter[int] = Counter()
        """Of each of these leases, by its number: siblings share one."""
        self._renew_at = -math.inf
        self.given_back: list[I64] = []
        """Leases that are needed no more; the caller empties it, and tells their lenders."""
        self.costs = TransferCosts(kv.block_size)
        self.waiting: dict[Sequence, LoadWait] = {}
        self._passed: set[Sequence] = set()
        """Preempted requests that are done with waiting, until they are asked for."""
        self._loads: list[BlockLoad] = []
        self._store: BlockStore | None = None
        self._is_worthy: NDArray[np.bool_] = np.zeros(kv.pool.num_blocks, np.bool_)
        """Of each block, whether it was used again since it was last stored."""
        self._may_be_worthy = False
        self._urgent: deque[I32] = deque(maxlen=MAX_URGENT)
        self._is_losing = False
        self._num_loads = self._num_loaded = self._num_short = self._num_given_up = self._num_stores = 0
        self._num_stored = 0
        self._load_s = self._store_s = 0.0
        self._num_pulls = self._num_pulled = self._num_lost_leases = 0
        self._pull_s = 0.0
        kv.on_evict = self._on_evict
        cache.on_forget = self._on_forget

    # What the scheduler tells

    def lend(self, sequence: Sequence) -> None:
        """A request begins here, and decodes elsewhere."""
        if self.leases is not None:
            self.leases.expect(sequence)

    def keep_lease(self, sequence: Sequence) -> None:
        """A request comes with a lease on blocks of another replica. It may need something else first."""
        lease = sequence.submit.kv_lease
        if lease.size == 4:
            self._kept[sequence] = lease[:3]
            self._num_keepers[lease.item(2)] += 1

    def borrow(self, sequence: Sequence) -> None:
        """A request with a lease has all else that it needs. `holds` is asked next."""
        lease = sequence.submit.kv_lease
        if sequence in self._kept and 0 < lease.item(3) <= len(sequence.hashes) // HASH_BYTES:
            self._borrowed[sequence] = Borrowed(lease[:3], lease.item(3))

    def _give_back(self, sequence: Sequence) -> None:
        self._borrowed.pop(sequence, None)
        lease = self._kept.pop(sequence, None)
        if lease is None:
            return
        self._num_keepers[lease.item(2)] -= 1
        if not self._num_keepers[lease.item(2)]:
            del self._num_keepers[lease.item(2)]
            self.given_back.append(lease)

    def renewals(self, now: float) -> list[I64]:
        """Leases that requests here still need, if it is time to tell their lenders."""
        if not self._kept or now < self._renew_at:
            return []
        self._renew_at = now + RENEWAL_S
        for sequence in [one for one in self._kept if one.state is FINISHED]:
            self._give_back(sequence)
        return list({lease.item(2): lease for lease in self._kept.values()}.values())

    @property
    def next_renewal(self) -> float:
        """When `renewals` should be asked next; infinity: there is no lease to renew."""
        return self._renew_at if self._kept else math.inf

    def reused(self, blocks: I32) -> None:
        """A request takes over these blocks of the prefix cache."""
        self._is_worthy[blocks] = True
        self._may_be_worthy = True

    def preempted(self, blocks: I32) -> None:
        """A request that comes back leaves these, its first ones."""
        self._urgent.append(blocks)

    def answered(self, step: int) -> None:
        """The workers are through with this step."""
        self._last_answered = step

    def void(self, step: int) -> None:
        """Steps up to this one do not count. The workers may be at them still."""
        self._last_void = step

    def observe_step(self, record: StepRecord, seconds: float) -> None:
        self.costs.observe_step(record.num_tokens - record.num_decode, record.num_tokens, seconds)

    def forget_all(self) -> None:
        """Nothing that was computed until now may be found."""
        self.reset()
        self._directory.forget_all()

    def reset(self) -> None:
        """Nothing is in memory any more, and nothing that is under way may be found."""
        for load in self._loads:
            load.is_void = True
        if self._store is not None:
            self._store.is_void = True
        self._is_worthy[:] = False
        self._urgent.clear()
        if self.leases is not None:
            self.leases.drop_all()

    def lose_workers(self) -> None:
        """The workers are gone, and what was under way. Until `end_loss`, requests are only noted."""
        for load in self._loads:
            self._kv.let_go(np.concatenate((load.found, load.blocks)))
        self._loads.clear()
        if self._store is not None:
            self._kv.let_go(self._store.blocks)
            self._store = None
        for wait in self.waiting.values():
            wait.until = math.inf
        if self.leases is not None:
            self.leases.era = None
            self.leases.drop_all()
        self._last_void = 0
        self._is_losing = True

    def end_loss(self) -> None:
        """Nothing is left in memory: what the tiers have is looked up by `next`."""
        self._is_losing = False
        self.reset()

    def _on_evict(self, blocks: NDArray[np.intp]) -> None:
        self._is_worthy[blocks] = False

    def _on_forget(self, hashes: bytes) -> None:
        self._directory.remove(hashes)
        if self.leases is not None:
            self.leases.forget(hashes[:HASH_BYTES])
        for load in self._loads:
            load.is_void |= load.hashes[:HASH_BYTES] == hashes[:HASH_BYTES]

    # Requests

    def holds(self, sequence: Sequence) -> bool:
        """Whether a request that would wait for a slot waits for a load first."""
        if sequence in self.waiting:
            return True
        if sequence in self._passed:
            self._passed.discard(sequence)
            return False
        if self._is_losing:
            self.waiting[sequence] = LoadWait(MAX_WAIT_S)
            return True
        num_blocks = self._num_loadable(sequence)
        is_borrowed = sequence in self._borrowed  # its frontend has found that this is sooner
        if not num_blocks or not (is_borrowed or self.costs.is_load_faster(num_blocks)):
            self._give_back(sequence)
            return False
        patience_s = self.costs.compute_s(num_blocks) or MAX_WAIT_S
        self.waiting[sequence] = LoadWait(max(patience_s, MIN_PULL_WAIT_S) if is_borrowed else patience_s)
        return True

    def _num_loadable(self, sequence: Sequence) -> int:
        """How many blocks the tiers have behind those of a request that memory has; no more than one load takes."""
        if not sequence.hashes or not sequence.may_read_cache:
            return 0
        self._cache.look_up(sequence)
        most = min(len(sequence.hashes) // HASH_BYTES, (sequence.known.size - 1) // self._kv.block_size)
        first = sequence.hits.size
        borrowed = self._borrowed.get(sequence)
        if borrowed is not None and borrowed.num_blocks > first:
            return min(borrowed.num_blocks, most) - first
        return self._directory.count(
            sequence.hashes[HASH_BYTES * first : HASH_BYTES * min(most, first + self._max_load)]
        )

    def _pass(self, sequence: Sequence) -> None:
        """A request waits no more."""
        del self.waiting[sequence]
        self._give_back(sequence)
        if sequence.slot < 0 and sequence.num_preemptions:
            self._passed.add(sequence)
        self._go_on(sequence)
        self._passed.discard(sequence)

    @property
    def next_deadline(self) -> float:
        """When a request has waited long enough, or a lease is over; infinity: there is neither."""
        first = min((wait.until for wait in self.waiting.values()), default=math.inf)
        if self.leases is None or not self.leases.num_leases:
            return first
        return min(first, self.leases.next_deadline(self._num_wanted()))

    @property
    def is_moving(self) -> bool:
        """Whether anything is under way."""
        return bool(self._loads) or self._store is not None

    @property
    def holds_blocks(self) -> bool:
        """Whether requests may lack room for the sake of what is under way, or lent."""
        return self.is_moving or (self.leases is not None and self.leases.num_leases > 0)

    # What is to be moved

    def next(self, now: float, is_idle: bool) -> list[BlockLoad | BlockStore]:
        """What the workers are to do now, in this order. Lets requests go on that need not wait any more.

        is_idle: there is nothing to compute.
        """
        if self.leases is not None and self.leases.num_leases:
            self.leases.sweep(now, self._num_wanted())
        if self.waiting:
            self._next_loads(now)
        jobs: list[BlockLoad | BlockStore] = []
        if self._last_answered >= self._last_void:
            for load in self._loads:
                if not load.is_begun and load.after <= self._ledger.last_done:
                    load.is_begun = True
                    jobs.append(load)
        if self._store is None and (self._urgent or self._may_be_worthy):
            blocks = self._next_stored(is_idle)
            if blocks.size:
                self._kv.hold(blocks)
                hashes = b"".join(self._index.hashes_of(blocks))
                self._store = BlockStore(hashes, blocks)
                jobs.append(self._store)
        return jobs

    def _next_loads(self, now: float) -> None:
        num_stuck = 0
        lacks_room = False
        under_way = {load.wanted[:HASH_BYTES]: load for load in self._loads}
        num_pulls = sum(load.source is not None for load in self._loads)
        num_loads = len(self._loads) - num_pulls
        for sequence in sorted(self.waiting, key=lambda s: (not s.has_started, s.priority, s.arrival_index)):
            if sequence.state is FINISHED:
                del self.waiting[sequence]
                self._give_back(sequence)
                continue
            wait = self.waiting[sequence]
            if wait.is_over(now):
                self._num_given_up += 1
                self._pass(sequence)
                continue
            if num_stuck >= MAX_STUCK:
                wait.is_held_up = sequence in self._borrowed
                continue
            # What it lacks may be under way already, or there by now.
            num_blocks = self._num_loadable(sequence)
            found = sequence.hits
            first = sequence.hashes[HASH_BYTES * found.size : HASH_BYTES * (found.size + 1)]
            if first and first in under_way:
                num_stuck += 1  # it finds what another one loads
                wait.is_held_up = under_way[first].source is not None and not under_way[first].is_begun
                continue
            if not num_blocks:
                self._pass(sequence)
                continue
            # A load of its own, of a lease or of a tier.
            source = self._borrowed.get(sequence)
            if source is not None and source.num_blocks <= found.size:
                source = None
            is_turn = num_loads < MAX_LOADS if source is None else num_pulls < MAX_PULLS
            if lacks_room or not is_turn or not self._has_room(num_blocks + self._num_unheld(found)):
                num_stuck += 1
                if not self._loads and self._batch.num_free_slots == self._batch.num_slots and self._store is None:
                    self._pass(sequence)  # nothing will make room for it
                elif source is not None:
                    wait.is_held_up = True
                    lacks_room |= is_turn
                continue
            num_loads, num_pulls = num_loads + (source is None), num_pulls + (source is not None)
            wait.is_held_up = source is not None  # by steps under way
            self._kv.hold(found)
            blocks = self._kv.reserve(num_blocks)
            if source is not None:  # of now: the weights may have changed since it came
                source.digest = sequence.hashes[HASH_BYTES * (source.num_blocks - 1) : HASH_BYTES * source.num_blocks]
            hashes = sequence.hashes[: HASH_BYTES * (found.size + num_blocks)]
            load = BlockLoad(hashes, found, blocks, now, source=source, after=self._ledger.last_step)
            self._loads.append(load)
            under_way[first] = load
            num_stuck += 1

    def _num_unheld(self, blocks: I32) -> int:
        """How many of these are free now."""
        return blocks.size - self._kv.pool.num_referenced(blocks)

    def _has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks can be missed: beside them, every row that runs may grow twice."""
        num_running = self._batch.num_slots - self._batch.num_free_slots
        return num_blocks + 2 * num_running <= self._kv.num_free

    def _next_stored(self, is_idle: bool) -> I32:
        """The blocks of the next store, each of them free or held by others, and found by its hash."""
        num_running = self._batch.num_slots - self._batch.num_free_slots
        room = min(self._max_store, self._kv.num_free - 2 * num_running)
        if room <= 0:
            return np.zeros(0, np.int32)
        while self._urgent:
            blocks = self._urgent[0]
            chosen, num_looked_at = self._worth_storing(blocks, room)
            if num_looked_at == blocks.size:
                self._urgent.popleft()
            else:
                self._urgent[0] = blocks[num_looked_at:]
            if chosen.size:
                return chosen
        if not self._is_worthy.any():
            self._may_be_worthy = False
            return np.zeros(0, np.int32)
        if is_idle:
            candidates = np.flatnonzero(self._is_worthy).astype(np.int32)
        else:
            near = LOOK_AHEAD * self._max_store
            if self._kv.pool.num_unkept > near:
                return np.zeros(0, np.int32)
            candidates = self._kv.pool.next_evictions(near)
            candidates = candidates[self._is_worthy[candidates]]
        chosen, num_looked_at = self._worth_storing(candidates, room)
        self._is_worthy[candidates[:num_looked_at]] = False
        return chosen

    def _worth_storing(self, blocks: I32, most: int) -> tuple[I32, int]:
        """Up to so many of these that are found by a hash, and that the tiers lack; and how many of them were looked at."""
        looked_at = blocks[: 4 * most]
        hashes = self._index.hashes_of(looked_at)
        known = [at for at, one in enumerate(hashes) if one]
        if not known:
            return np.zeros(0, np.int32), looked_at.size
        is_missing = self._directory.missing(b"".join(hashes[at] for at in known))
        missing = [at for at, lacks in zip(known, is_missing, strict=True) if lacks]
        num_looked_at = looked_at.size if len(missing) <= most else missing[most]
        return looked_at[missing[:most]], num_looked_at

    # What became of it

    def loaded(self, load: BlockLoad, num_good: int, seconds: float, now: float) -> None:
        """The first so many blocks of a load have what they should have. seconds: that reading took."""
        if load not in self._loads:
            return  # the workers were lost meanwhile
        self._loads.remove(load)
        num_good = max(0, min(num_good, load.blocks.size))
        self._count(load, num_good, seconds, now)
        good, bad = load.blocks[:num_good], load.blocks[num_good:]
        blocks = np.concatenate((load.found, good))
        if num_good and not load.is_void:
            self._cache.publish_loaded(load.hashes[: HASH_BYTES * blocks.size], blocks)
        self._kv.let_go(np.concatenate((bad, blocks)))
        if bad.size:
            self._give_up(load.wanted[HASH_BYTES * num_good :][:HASH_BYTES])

    def _count(self, load: BlockLoad, num_good: int, seconds: float, now: float) -> None:
        is_short = num_good < load.blocks.size
        if load.source is not None:
            self._num_pulls += 1
            self._num_pulled += num_good
            self._num_lost_leases += is_short
            self._pull_s += seconds
            return
        self._num_loads += 1
        self._num_short += is_short
        self._load_s += seconds
        if num_good and not load.is_void:
            self._num_loaded += num_good
            self.costs.observe_load(num_good, seconds, now - load.began)

    def _give_up(self, lacking: bytes) -> None:
        """The block of this hash cannot be loaded: those that it comes next for compute it."""
        for sequence in list(self.waiting):
            if sequence.state is not FINISHED:
                self._cache.look_up(sequence)
                at = HASH_BYTES * sequence.hits.size
                if sequence.hashes[at : at + HASH_BYTES] == lacking:
                    self._pass(sequence)

    def stored(self, store: BlockStore, num_stored: int, seconds: float) -> None:
        """So many blocks of a store were written. seconds: that it took."""
        if store is not self._store:
            return
        self._store = None
        self._num_stores += 1
        self._num_stored += num_stored
        self._store_s += seconds
        hashes = self._index.hashes_of(store.blocks)
        wanted = [store.hashes[at : at + HASH_BYTES] for at in range(0, len(store.hashes), HASH_BYTES)]
        # What was forgotten meanwhile may have been wrong.
        wrong = wanted if store.is_void else [one for one, now in zip(wanted, hashes, strict=True) if now != one]
        if wrong:
            self._directory.remove(b"".join(wrong))
        self._kv.let_go(store.blocks)

    # Looking

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(
            num_waiting=len(self.waiting),
            num_loads=self._num_loads,
            num_loaded_blocks=self._num_loaded,
            num_short_loads=self._num_short,
            load_s=self._load_s,
            num_given_up=self._num_given_up,
            num_stores=self._num_stores,
            num_stored_blocks=self._num_stored,
            store_s=self._store_s,
            num_handed_off=0 if self.leases is None else self.leases.num_granted,
            num_leases=0 if self.leases is None else self.leases.num_leases,
            num_expired_leases=0 if self.leases is None else self.leases.num_expired,
            num_pulls=self._num_pulls,
            num_pulled_blocks=self._num_pulled,
            num_lost_leases=self._num_lost_leases,
            pull_s=self._pull_s,
            costs=self.costs.statistics(),
        )

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        for sequence in self.waiting:
            may_wait = sequence.state in (State.BLOCKED, State.PREEMPTED, FINISHED)
            assert may_wait, f"{sequence.key} waits for a load and is {sequence.state}"
        assert self._borrowed.keys() <= self.waiting.keys(), "a request has a lease and does not wait for the copy"
        assert self._borrowed.keys() <= self._kept.keys(), "a request waits for a copy by a lease that is not renewed"
        held = [load.found for load in self._loads] + [load.blocks for load in self._loads]
        held += [] if self._store is None else [self._store.blocks]
        held += [] if self.leases is None else [self.leases.held]
        counts = np.bincount(np.concatenate(held), minlength=self._kv.pool.num_blocks) if held else 0
        assert np.all(self._kv.num_held == counts), "blocks are held for no transfer, or not held for one"
