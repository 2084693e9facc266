"""`Residency`: which adapters the workers hold in slots, which requests use them, and which requests wait for one.

A request with an adapter is blocked until its adapter has a slot. Requests are let in by priority, then by arrival. A slot is
given to another adapter when no request uses it and no step in flight may. Of several such slots, the one that was used
longest ago goes. While a request waits for a slot, others whose adapter has one may overtake it, but no more than
MAX_OVERTAKING of them. So an adapter with many requests keeps no other from running.

Pure: what has to be loaded is returned, and the caller says what became of it. Invariants (`check_integrity`): an adapter has at
most one slot. A request that was let in uses a slot of its own adapter until it has ended.
Owned by `actors.adapters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from actorllm.scheduling.ledger import Ledger
from actorllm.scheduling.sequence import FINISHED, Sequence
from actorllm.types.adapter_folder import Adapter

MAX_OVERTAKING = 64
"""Requests that may go on before one that has waited longer for a slot."""


@dataclass(slots=True, eq=False)
class AdapterSlot:
    """One slot of every worker."""

    number: int
    """From 1 on: 0 is what rows without an adapter have."""
    adapter: Adapter | None = None
    """None: it is free."""
    is_ready: bool = False
    """The workers have the adapter; else they are loading it."""
    users: dict[Sequence, str] = field(default_factory=dict)
    """Requests that were let in and, as far as was looked, have not ended; and the folder that each named."""
    last_used: int = 0
    """By the count of requests that were let in."""
    idle_after: int = 0
    """The last step that may name a request of it, once it has no users."""


class Residency:
    """See the module docstring."""

    def __init__(self, num_slots: int, ledger: Ledger) -> None:
        self.slots = [AdapterSlot(number) for number in range(1, num_slots + 1)]
        self.waiting: dict[Sequence, Adapter] = {}
        """In the order in which they came."""
        self._by_digest: dict[str, AdapterSlot] = {}
        self._ledger = ledger
        self._num_let_in = 0
        self._first: Sequence | None = None
        """The first request that waits for a slot, and how many have overtaken it."""
        self._num_overtaking = 0

    def add(self, sequence: Sequence, adapter: Adapter) -> None:
        """A blocked request wants its adapter."""
        self.waiting[sequence] = adapter

    def next(self) -> Iterator[tuple[Sequence, AdapterSlot] | AdapterSlot]:
        """What can be done now: a request with the slot that it may use, or a slot that has to be loaded.

        The caller carries each out before it asks for the next.
        """
        self._forget_ended()
        overtaken: Sequence | None = None
        wanted: set[str] = set()
        for sequence in sorted(self.waiting, key=lambda s: (s.priority, s.arrival_index)):
            adapter = self.waiting.get(sequence)
            if adapter is None:
                continue  # it has ended meanwhile
            slot = self._by_digest.get(adapter.digest)
            wanted.add(adapter.digest)  # those behind it do not take its slot
            if slot is None:
                slot = None if overtaken is not None else self._free_slot(wanted)
                if slot is not None:
                    self._occupy(slot, adapter)
                    yield slot
                elif overtaken is None:
                    overtaken = sequence
                    if sequence is not self._first:
                        self._first, self._num_overtaking = sequence, 0
                continue
            if not slot.is_ready:
                continue
            if overtaken is not None:
                if self._num_overtaking >= MAX_OVERTAKING:
                    break
                self._num_overtaking += 1
            del self.waiting[sequence]
            self._num_let_in += 1
            slot.users[sequence] = adapter.path
            slot.last_used = self._num_let_in
            yield sequence, slot
        if overtaken is None:
            self._first = None

    def loaded(self, slot: AdapterSlot) -> None:
        """The workers have the adapter of this slot."""
        slot.is_ready = True

    def failed(self, slot: AdapterSlot) -> list[Sequence]:
        """It cannot be loaded from its folder. Returns the requests that named this folder.

        One content may lie in several folders. If requests that named another one use the slot, it has that folder from now on,
        and is to be loaded again. Else it is free, and those that wait with another folder have their turn.
        """
        adapter = slot.adapter
        if adapter is None:
            return []
        wanting = [sequence for sequence, wanted in self.waiting.items() if wanted == adapter]
        for sequence in wanting:
            del self.waiting[sequence]
        self._forget_users(slot)
        users = [sequence for sequence, path in slot.users.items() if path == adapter.path]
        slot.users = {sequence: path for sequence, path in slot.users.items() if path != adapter.path}
        if slot.users:
            slot.adapter = Adapter(adapter.digest, next(iter(slot.users.values())))
            slot.is_ready = False
        else:
            self._vacate(slot)
        return [*users, *wanting]

    def lose_workers(self) -> list[AdapterSlot]:
        """The workers are gone, and what they held. Returns the slots that requests use: they are loaded again first."""
        for slot in self.slots:
            slot.is_ready = False
            self._forget_users(slot)
            if not slot.users:
                self._vacate(slot)
        return [slot for slot in self.slots if slot.adapter is not None]

    def forget(self, digest: str) -> None:
        """Requests to come read this adapter anew, unless others still use it."""
        slot = self._by_digest.get(digest)
        if slot is not None and slot.is_ready:
            self._forget_users(slot)
            if not slot.users:
                self._vacate(slot)

    def _occupy(self, slot: AdapterSlot, adapter: Adapter) -> None:
        self._vacate(slot)
        slot.adapter = adapter
        self._by_digest[adapter.digest] = slot

    def _vacate(self, slot: AdapterSlot) -> None:
        if slot.adapter is not None:
            del self._by_digest[slot.adapter.digest]
        slot.adapter, slot.is_ready = None, False

    def _free_slot(self, wanted: Set[str]) -> AdapterSlot | None:
        """One that is free, or can be freed; not one of these adapters."""
        idle = []
        for slot in self.slots:
            self._forget_users(slot)
            is_needed = slot.adapter is not None and (not slot.is_ready or slot.adapter.digest in wanted)
            if not slot.users and not is_needed and slot.idle_after <= self._ledger.last_done:
                idle.append(slot)
        return min(idle, key=lambda slot: (slot.adapter is not None, slot.last_used), default=None)

    def _forget_users(self, slot: AdapterSlot) -> None:
        if slot.users:
            slot.users = {one: path for one, path in slot.users.items() if one.state is not FINISHED}
            if not slot.users:  # a step in flight may compute a row of one that ended, in vain
                slot.idle_after = self._ledger.next_step - 1

    def _forget_ended(self) -> None:
        for sequence in [sequence for sequence in self.waiting if sequence.state is FINISHED]:
            del self.waiting[sequence]

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        held = [slot.adapter.digest for slot in self.slots if slot.adapter is not None]
        assert len(held) == len(set(held)) == len(self._by_digest), "an adapter has two slots"
        for slot in self.slots:
            assert slot.adapter is None or self._by_digest[slot.adapter.digest] is slot, "a slot that is not found"
            assert slot.is_ready <= (slot.adapter is not None), "a free slot is ready"
            for sequence in slot.users:
                is_over = sequence.state is FINISHED
                assert is_over or slot.adapter is not None, "a request uses a slot that is free"
                assert is_over or sequence.adapter_slot in (0, slot.number), "a request uses another slot"
