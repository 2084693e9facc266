"""`Leases`: KV blocks of prompts that another replica may copy for a short time, and when they are free again.

A request that is handed off computes its prompt here and decodes elsewhere. Once its prompt is computed, its full blocks are
leased: they are held (`KVCacheManager.hold`), and a table that both replicas see names them. The reader copies them, and looks at
the table again after that. If the lease is still there, the blocks were not reused meanwhile. Otherwise it computes them.

A lease ends when its reader has taken the blocks, when its term is over, or when the KV must not be found any more. The term begins
anew when the reader says that its request still queues. A lease leaves the table before its blocks are free. So nothing waits for
a reader, and one that says nothing keeps blocks for no longer than a term. Where requests of this replica lack blocks, leases that
are no longer new end as well, renewed or not, the oldest first.

Pure: the table is given. Owned by `Transfers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from actorllm.kvcache.manager import KVCacheManager
from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.messages import I32, I64, NO_I32
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.sequence import FINISHED, Key, Sequence

TERM_S = 10.0
"""How long a lease lasts at most, unless its reader renews it."""
RENEWAL_S = TERM_S / 4
"""How often a reader renews it."""
GRACE_S = 0.25
"""How long it lasts though requests of this replica lack its blocks."""


class LeaseTable(Protocol):
    """What readers see of the leases of a replica."""

    def grant(self, blocks: I32, digest: bytes, era: int) -> I64 | None:
        """Name these blocks. Returns what a reader finds them by (`Submit.kv_lease`); None: there is no room.

        digest: the hash of the last of them, which covers all. era: of the memory that they are in.
        """

    def end(self, lease: I64) -> None:
        """From here on a reader that looks finds nothing."""

    def is_taken(self, lease: I64) -> bool:
        """Its reader has what it wants."""

    def is_renewed(self, lease: I64) -> bool:
        """Its reader has said, since this was asked last, that it still wants the blocks."""

    def clear(self) -> None:
        """There is no lease."""


@dataclass(slots=True, eq=False)
class Offer:
    """A lease that has just been granted."""

    key: Key
    """Of the request."""
    lease: I64
    blocks: I32
    num_cached: int
    """Tokens of the prompt that were found in the prefix cache."""


@dataclass(slots=True, eq=False)
class _Lease:
    lease: I64
    blocks: I32
    first_hash: bytes
    grace_until: float
    until: float
    """Unless it is renewed."""


class Leases:
    """See the module docstring."""

    def __init__(self, table: LeaseTable, kv: KVCacheManager, batch: Batch, term_s: float = TERM_S) -> None:
        self._table, self._kv, self._batch = table, kv, batch
        self._term_s = term_s
        self._leases: list[_Lease] = []
        self._expected: set[Sequence] = set()
        self.era: int | None = None
        """Of the memory that the workers of now compute in; None: not known, and nothing is leased."""
        self.num_granted = self.num_expired = 0
        table.clear()

    def expect(self, sequence: Sequence) -> None:
        """This request is to be handed off once its prompt is computed."""
        self._expected.add(sequence)

    def new_offers(self, now: float) -> Iterator[Offer]:
        """Of requests whose prompt is computed by now."""
        known = self._batch.num_known
        for sequence in [*self._expected] if self.era is not None else ():
            if sequence.state is FINISHED:
                self._expected.discard(sequence)
            elif sequence.slot >= 0 and known.item(sequence.slot) > sequence.known.size:
                self._expected.discard(sequence)
                offer = self._grant(sequence, now)
                if offer is not None:
                    yield offer

    def offer_at_end(self, sequence: Sequence, now: float) -> Offer | None:
        """Of a request that has just ended, with the last thing that was done: what the prefix cache has of its prompt."""
        if sequence not in self._expected or sequence.submit.max_tokens > 1 or self._kv.index is None:
            return None
        self._expected.discard(sequence)
        most = min(sequence.num_prompt // self._kv.block_size, len(sequence.hashes) // HASH_BYTES)
        return self._lease(sequence, self._kv.index.find(sequence.hashes, most), now)

    def _grant(self, sequence: Sequence, now: float) -> Offer | None:
        """None: it has no whole block that can be told from others, or there is no room in the table. It stays here then."""
        number = min(sequence.num_published, sequence.num_prompt // self._kv.block_size)
        if not sequence.can_publish:
            return None
        return self._lease(sequence, self._kv.tables[0, sequence.slot, :number].copy(), now)

    def _lease(self, sequence: Sequence, blocks: I32, now: float) -> Offer | None:
        number = blocks.size
        if not number or self.era is None:
            return None
        lease = self._table.grant(blocks, sequence.hashes[HASH_BYTES * (number - 1) : HASH_BYTES * number], self.era)
        if lease is None:
            return None
        self._kv.hold(blocks)
        grace_until = now + min(GRACE_S, self._term_s)
        self._leases.append(_Lease(lease, blocks, sequence.first_hash, grace_until, now + self._term_s))
        self.num_granted += 1
        return Offer(sequence.key, lease, blocks, sequence.num_cached_tokens)

    def sweep(self, now: float, num_wanted: int = 0) -> None:
        """Let go of what was taken, and of what has been leased for long enough. num_wanted: blocks that should be free."""
        for one in self._leases[:]:
            is_taken = self._table.is_taken(one.lease)
            if self._table.is_renewed(one.lease):
                one.until = now + self._term_s
            is_in_the_way = now >= one.grace_until and self._kv.num_free < num_wanted
            if is_taken or now >= one.until or is_in_the_way:
                self.num_expired += not is_taken
                self._end(one)

    def forget(self, first_hash: bytes) -> None:
        """What begins with the block of this hash is not what it should be."""
        for one in self._leases[:]:
            if one.first_hash == first_hash:
                self._end(one)

    def drop_all(self) -> None:
        """Nothing that was leased may be found any more."""
        for one in self._leases[:]:
            self._end(one)

    def _end(self, one: _Lease) -> None:
        self._table.end(one.lease)
        self._leases.remove(one)
        self._kv.let_go(one.blocks)

    def next_deadline(self, num_wanted: int = 0) -> float:
        """When the first lease is over; infinity: there is none. num_wanted: as of `sweep`."""
        if not self._leases:
            return math.inf
        first = min(one.until for one in self._leases)
        return min(first, self._leases[0].grace_until) if self._kv.num_free < num_wanted else first

    @property
    def num_expected(self) -> int:
        """Requests that are to be handed off, and whose prompt is not computed yet, as far as is known."""
        return len(self._expected)

    @property
    def num_leases(self) -> int:
        """That there are."""
        return len(self._leases)

    @property
    def held(self) -> I32:
        """The blocks of all leases, one after the other."""
        return np.concatenate([one.blocks for one in self._leases]) if self._leases else NO_I32
