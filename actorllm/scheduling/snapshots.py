"""`Snapshots`: which states of recurrent layers are kept behind a prefix, and when a request goes on from one.

A block of the KV cache does not hold the states of recurrent layers. So a model that has some takes over as many cached blocks as
end with a *snapshot*, the states behind these tokens. Workers keep it in a place of their memory (`kvcache.snapshot_pool`).
Snapshots are taken at *borders*: multiples of a number of tokens, at which a prompt is cut without a change of its arithmetic.

Two kinds are taken:

- *Marked* ones are found once their step is reported. One is behind the last border before the last token of a prompt: equal
  prompts find it, and the next turn of a conversation. Another is behind the last border of the blocks that a prompt shares with an
  earlier one, if there was no snapshot. Where two prompts part, such as behind a system prompt, others will part as well (Marconi,
  arXiv:2411.19379).
- A request's *own* one is behind the last border that it has passed, in its prompt or its output. It is found once the request has
  left its slot: by the request itself after a preemption, else by the next turn. The next own one replaces it.

A step that is reported keeps what it has saved; of a void step nothing is kept. Own snapshots of requests take at most half of the
places, and so do not drive out what many requests share.

Invariants (`check_integrity`): a place that is neither free nor published belongs to a save in flight, or to a request in a slot.
Owned by Scheduler; None there for models without recurrent layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.kvcache.snapshot_pool import SnapshotPool
from actorllm.messages import I32
from actorllm.scheduling.batch import Batch, Rows
from actorllm.scheduling.sequence import Sequence
from actorllm.types.kv_groups import border_of


class Save(NamedTuple):
    """A step keeps the states of a request."""

    sequence: Sequence
    position: int
    """Tokens that they are behind."""
    place: int
    is_marked: bool


class Snapshots:
    """See the module docstring."""

    def __init__(
        self, num_places: int, block_size: int, batch: Batch, *, tokens: int, has_drafts: bool = False
    ) -> None:
        """What is kept of each other's states.

        Arguments:
            num_places: that workers have.
            block_size: tokens of a block.
            tokens: snapshots are behind multiples of so many tokens that are whole blocks.
            has_drafts: decode rows compute tokens that may be wrong, and no states are kept of them.
        """
        self._pool = SnapshotPool(num_places)
        self._block_size = block_size
        self._border = border_of(block_size, tokens)
        self._batch = batch
        self._has_drafts = has_drafts
        self._most_own, self._most_coming = num_places // 2, max(1, num_places // 4)
        self._num_coming = 0
        """Own snapshots of steps in flight."""
        self._own: dict[Sequence, tuple[int, int]] = {}
        """Of requests in slots: tokens that the own snapshot is behind, and its place."""
        self._branches: dict[Sequence, int] = {}
        """Of requests in slots: where they part from one before them, in tokens, if there is no snapshot."""
        self._restored: list[tuple[Sequence, int]] = []
        """Requests that begin with the next plan, and the places that they go on from."""

    # Finding ----------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Changes whenever what is found may have changed."""
        return self._pool.version

    def usable(self, hashes: bytes, found: I32) -> I32:
        """Those of the first blocks of a prefix that can be taken over: the last of them ends with a snapshot."""
        return found[: self._pool.longest(hashes, found.size)] if found.size else found

    def begin(self, sequence: Sequence, num_found: int) -> None:
        """A request starts with what it has found (`Sequence.hits`). num_found: cached blocks, be there a snapshot or not."""
        if sequence.hits.size:
            self._restored.append((sequence, self._pool.use(sequence.hashes, sequence.hits.size)))
        branch = num_found * self._block_size // self._border * self._border
        if branch > sequence.num_done:
            self._branches[sequence] = branch

    # Planning ---------------------------------------------------------------------------------------------------------

    def take_restored(self) -> list[tuple[int, int]]:
        """Slots that begin with the plan which is made, and the places that they go on from."""
        restored = [(sequence.slot, place) for sequence, place in self._restored]
        self._restored.clear()
        return restored

    def plan(self, chunks: Iterable[tuple[Sequence, int]], rows: Rows) -> tuple[Save, ...]:
        """What the step that is planned saves.

        Arguments:
            chunks: its prompts, with how many tokens of each; they count as computed.
            rows: its decode rows, in the same way.
        """
        saves: list[Save] = []
        for sequence, size in chunks:
            if sequence.can_publish:
                end = self._batch.num_computed.item(sequence.slot)
                self._add_chunk(saves, sequence, end - size, end)
        if self._has_drafts or not rows.slots.size:
            return tuple(saves)
        computed = self._batch.num_computed[rows.index]
        for row in np.flatnonzero(computed % self._border == 0).tolist():
            sequence = rows.sequences[row]
            if sequence.can_publish:
                self._add_own(saves, sequence, computed.item(row))
        return tuple(saves)

    def _add_chunk(self, saves: list[Save], sequence: Sequence, start: int, end: int) -> None:
        """Of the tokens [start, end) of a prompt."""
        last = (sequence.known.size - 1) // self._border * self._border
        marks = {last, self._branches.get(sequence, last)}
        for position in sorted(mark for mark in marks if start < mark <= end):
            num_blocks = position // self._block_size
            is_hashed = HASH_BYTES * num_blocks <= len(sequence.hashes)
            if is_hashed and not self._pool.has(sequence.hashes, num_blocks):
                place = self._pool.take()
                if place is not None:
                    saves.append(Save(sequence, position, place, is_marked=True))
        position = end // self._border * self._border
        if position > start and position not in marks:
            self._add_own(saves, sequence, position)

    def _add_own(self, saves: list[Save], sequence: Sequence, position: int) -> None:
        is_new = sequence not in self._own
        if self._num_coming >= self._most_coming or (is_new and len(self._own) + self._num_coming >= self._most_own):
            return
        place = self._pool.take()
        if place is not None:
            saves.append(Save(sequence, position, place, is_marked=False))
            self._num_coming += 1

    # Results ----------------------------------------------------------------------------------------------------------

    def reported(self, saves: Iterable[Save], bad: Collection[Sequence]) -> None:
        """A step is done that has saved these. bad: requests whose states are not finite."""
        for save in saves:
            sequence, position, place, is_marked = save
            self._num_coming -= not is_marked
            if sequence.slot < 0 or not sequence.can_publish or sequence in bad:
                self._pool.give_back(place)
                continue
            before = self._own.get(sequence)
            if before is not None and before[0] < position:
                del self._own[sequence]
                self._pool.give_back(before[1])
            if is_marked:
                self._pool.publish(sequence.hashes, position // self._block_size, place)
            else:
                self._own[sequence] = position, place

    def voided(self, saves: Iterable[Save]) -> None:
        """A step is void that was to save these."""
        for save in saves:
            self._num_coming -= not save.is_marked
            self._pool.give_back(save.place)

    def has_own(self, sequence: Sequence) -> bool:
        """Whether a request in a slot leaves something that is found by the hashes of its output."""
        return sequence in self._own

    def publish_own(self, sequence: Sequence) -> None:
        """A request is about to leave its slot; it has the hashes of what it has computed."""
        own = self._own.get(sequence)
        if own is not None and HASH_BYTES * (own[0] // self._block_size) <= len(sequence.hashes):
            del self._own[sequence]
            self._pool.publish(sequence.hashes, own[0] // self._block_size, own[1])

    def leave(self, sequence: Sequence) -> None:
        """A request leaves its slot. What was not published is not kept."""
        self._branches.pop(sequence, None)
        own = self._own.pop(sequence, None)
        if own is not None:
            self._pool.give_back(own[1])

    # Forgetting -------------------------------------------------------------------------------------------------------

    def forget(self, first: bytes) -> None:
        """Nothing that begins with the block of this hash is found any more."""
        self._pool.forget(first)

    def reset(self) -> None:
        """Nothing is found any more. Requests in slots, which must not publish, keep their own until they leave."""
        self._pool.clear()

    @property
    def num_published(self) -> int:
        return self._pool.num_published

    @property
    def num_evicted(self) -> int:
        """Published ones whose places were needed for others, since the start."""
        return self._pool.num_evicted

    def check_integrity(self, in_flight: Iterable[Save]) -> None:
        """AssertionError when an invariant of the module docstring does not hold. in_flight: saves of all steps in flight."""
        saves = list(in_flight)
        for sequence, (position, _) in self._own.items():
            assert sequence.slot >= 0, f"{sequence.key} has left, and its snapshot is still its own"
            assert position % self._border == 0, f"{sequence.key} has a snapshot behind {position} tokens"
        assert all(sequence.slot >= 0 for sequence in self._branches), "a request has left, and parts from others still"
        assert not self._restored, "a request goes on from a snapshot, and no plan says so"
        assert self._num_coming == sum(not save.is_marked for save in saves), "count of own snapshots in flight"
        self._pool.check_integrity([*(place for _, place in self._own.values()), *(save.place for save in saves)])
