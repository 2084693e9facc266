"""`SnapshotPool`: where workers keep states of recurrent layers behind prefixes, and by which hash each is found.

A *snapshot* is what all recurrent layers have kept of a sequence behind some of its tokens. Workers have a fixed number of places
for snapshots. A place is free, held by the caller, or published. A published one is found by the hash of the block that its tokens
end with, which covers all tokens before it. When no place is free, the one that was used longest ago is handed out again.

A place may be handed out although a step in flight reads it. Steps run in launch order, and each reads before it writes.

Invariants (`check_integrity`): every place is in exactly one of the three states. Snapshots that begin with the same block are
found by its hash as well. Owned by `scheduling.snapshots`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from actorllm.kvcache.prefix_index import HASH_BYTES


class Snapshot(NamedTuple):
    """A published one."""

    place: int
    num_blocks: int
    """That it is behind."""
    first: bytes
    """The hash of the first of these blocks."""


class SnapshotPool:
    """See the module docstring."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.version = 0
        """Changes whenever what is found may have changed."""
        self.num_evicted = 0
        """Places of published snapshots that were handed out again, since the start."""
        self._free = list(range(num_places - 1, -1, -1))
        self._published: dict[bytes, Snapshot] = {}
        """By hash; the one that was used longest ago comes first."""
        self._alike: dict[bytes, dict[bytes, int]] = {}
        """By the hash of the first block, the hashes of those that begin with it, and how many blocks each is behind."""

    @property
    def num_published(self) -> int:
        return len(self._published)

    def take(self) -> int | None:
        """A place that the caller holds from now on; None: all are held."""
        if self._free:
            return self._free.pop()
        if not self._published:
            return None
        place = self._remove(next(iter(self._published)))
        self.num_evicted += 1
        return place

    def give_back(self, place: int) -> None:
        """A held place is free."""
        self._free.append(place)

    def publish(self, hashes: bytes, num_blocks: int, place: int) -> None:
        """What a held place has is found from now on; of two that hold the same, the first stays.

        Arguments:
            hashes: of the blocks of a sequence, from the first one on.
            num_blocks: that the snapshot is behind.
        """
        hash_ = _last_hash(hashes, num_blocks)
        if hash_ in self._published:
            self.give_back(place)
            self._touch(hash_)
            return
        first = hashes[:HASH_BYTES]
        self._published[hash_] = Snapshot(place, num_blocks, first)
        self._alike.setdefault(first, {})[hash_] = num_blocks
        self.version += 1

    def has(self, hashes: bytes, num_blocks: int) -> bool:
        """Whether the state behind so many blocks of a sequence is found; if so, that counts as a use."""
        hash_ = _last_hash(hashes, num_blocks)
        if hash_ not in self._published:
            return False
        self._touch(hash_)
        return True

    def longest(self, hashes: bytes, num_blocks: int) -> int:
        """Behind how many of the first num_blocks blocks of a sequence there is a snapshot, at most; 0: there is none."""
        alike = self._alike.get(hashes[:HASH_BYTES])
        if alike is None:
            return 0
        for count in sorted(set(alike.values()), reverse=True):
            if count <= num_blocks and _last_hash(hashes, count) in alike:
                return count
        return 0

    def use(self, hashes: bytes, num_blocks: int) -> int:
        """The place of what `longest` found, which a step is about to read."""
        hash_ = _last_hash(hashes, num_blocks)
        self._touch(hash_)
        return self._published[hash_].place

    def forget(self, first: bytes) -> None:
        """Nothing that begins with the block of this hash is found any more."""
        for hash_ in list(self._alike.get(first, ())):
            self.give_back(self._remove(hash_))

    def clear(self) -> None:
        """Nothing is found any more."""
        for first in list(self._alike):
            self.forget(first)

    def _touch(self, hash_: bytes) -> None:
        self._published[hash_] = self._published.pop(hash_)

    def _remove(self, hash_: bytes) -> int:
        """A snapshot is found no more; its place is the caller's."""
        place, _, first = self._published.pop(hash_)
        alike = self._alike[first]
        del alike[hash_]
        if not alike:
            del self._alike[first]
        self.version += 1
        return place

    def check_integrity(self, held: Collection[int]) -> None:
        """AssertionError when an invariant of the module docstring does not hold. held: the places that the caller holds."""
        published = [snapshot.place for snapshot in self._published.values()]
        places = [*self._free, *held, *published]
        assert sorted(places) == list(range(self.num_places)), "a place is lost, or in two states"
        alike = {hash_: count for hashes in self._alike.values() for hash_, count in hashes.items()}
        assert alike == {hash_: one.num_blocks for hash_, one in self._published.items()}, (
            "a snapshot is found in one way"
        )
        assert all(self._alike.values()), "nothing is left that begins with a block"


def _last_hash(hashes: bytes, num_blocks: int) -> bytes:
    return hashes[HASH_BYTES * (num_blocks - 1) : HASH_BYTES * num_blocks]
