"""`WaitingOrder`: the waiting requests in the order of a `KeyPolicy`, at a cost that follows what changes and not how many wait.

Entries are in a heap by key. Three things keep the planner from going through all of them:

    groups      requests that always keep their order among each other (`KeyPolicy.group`) have one entry together, that of
                the first: a tenant whose counter grows is moved once, however many requests it has waiting
    horizons    when that of a key passes (`KeyPolicy.key_horizon`), this key is made anew and no other
    growth      keys that never fall (`KeyPolicy.keys_grow`) are made anew only of the request that seems to be next: an old
                key is at most the present one, so the request that is first with a present key is first

An entry counts if it is the newest of its group or request. The others, and those of requests that no longer wait, are dropped
when they come up, or when they are the most. Pure; owned by `KeyPlanner`.

`WaitingLines` is several of them, of which a step may leave some alone (`KeyPolicy.line`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

from actorllm.scheduling.sequence import WAITING, Sequence, State

if TYPE_CHECKING:
    from actorllm.scheduling.policy import KeyPolicy, SortKey, View

NUM_STALE = 64
"""So many entries that do not count are never cleaned out."""

Item = Hashable
"""A group, or a request that is in none."""


class WaitingOrder:
    """See the module docstring. Requests that end or start are not removed: their state says so."""

    def __init__(self, policy: KeyPolicy) -> None:
        self._policy = policy
        self._keys_grow = policy.keys_grow
        self._heap: list[tuple[SortKey, int, int, Sequence, Item]] = []
        """By key, arrival and number of the entry."""
        self._newest: dict[Item, int] = {}
        """Number of the entry that counts."""
        self._groups: dict[Item, list[tuple[SortKey, int, int, Sequence]]] = {}
        """Heaps by place and arrival; the entry of a group is that of its first request."""
        self._num_grouped = 0
        self._horizons: list[tuple[float, int, Sequence, Item]] = []
        self._num_entries = 0
        """Ever made."""

    def __len__(self) -> int:
        """Requests in it, those that wait no more included."""
        return len(self._newest) - len(self._groups) + self._num_grouped

    def push(self, sequence: Sequence, view: View) -> None:
        """A request waits, and is not in the order yet."""
        found = self._policy.group(sequence, view)
        if found is None:
            self._enter(sequence, sequence, view)
            return
        group, place = found
        members = self._groups.setdefault(group, [])
        heapq.heappush(members, (place, sequence.arrival_index, self._num_entries, sequence))
        self._num_grouped += 1
        if members[0][-1] is sequence:
            self._enter(group, sequence, view)

    def head(self, view: View) -> Sequence | None:
        """The next request; it stays where it is."""
        if self._horizons and self._horizons[0][0] <= view.now:
            self._renew(view)
        heap = self._heap
        while heap:
            key, arrival, number, sequence, item = heap[0]
            if self._newest.get(item) != number:
                heapq.heappop(heap)
            elif sequence.state is not WAITING:
                self.pop(view)
            elif self._keys_grow and (present := self._policy.key(sequence, view)) > key:
                heapq.heapreplace(heap, (present, arrival, number, sequence, item))
            else:
                return sequence
        return None

    @property
    def head_key(self) -> SortKey:
        """Of the request that `head` has just returned."""
        return self._heap[0][0]

    def pop(self, view: View) -> None:
        """Take the first one out."""
        _, _, _, sequence, item = heapq.heappop(self._heap)
        if item is sequence:
            del self._newest[item]
            return
        heapq.heappop(self._groups[item])
        self._num_grouped -= 1
        self._advance(item, view)

    def _advance(self, group: Item, view: View) -> None:
        """The entry of a group is that of its first request that waits; without one there is no group."""
        members = self._groups[group]
        while members and members[0][-1].state is not State.WAITING:
            heapq.heappop(members)
            self._num_grouped -= 1
        if members:
            self._enter(group, members[0][-1], view)
        else:
            del self._groups[group], self._newest[group]

    def before(self, order: tuple[SortKey, int], view: View) -> Iterator[Sequence]:
        """Requests that wait and come before this (key, arrival), in any order."""
        heap, places = self._heap, [0]
        while places:  # what lies below a place in the heap comes after it
            place = places.pop()
            if place >= len(heap) or heap[place][:2] >= order:
                continue
            places += (2 * place + 1, 2 * place + 2)
            _, _, number, sequence, item = heap[place]
            if self._newest.get(item) != number:
                continue
            if item is not sequence:
                yield from self._members_before(self._groups[item], order, view)
            elif sequence.state is State.WAITING and self._is_before(sequence, order, view):
                yield sequence

    def _members_before(
        self, members: list[tuple[SortKey, int, int, Sequence]], order: tuple[SortKey, int], view: View
    ) -> Iterator[Sequence]:
        places = [0]
        while places:
            place = places.pop()
            if place >= len(members):
                continue
            sequence = members[place][-1]
            if (self._policy.key(sequence, view), sequence.arrival_index) < order:
                places += (2 * place + 1, 2 * place + 2)
                if sequence.state is State.WAITING:
                    yield sequence

    def _is_before(self, sequence: Sequence, order: tuple[SortKey, int], view: View) -> bool:
        """Of a request whose entry says so."""
        return not self._keys_grow or (self._policy.key(sequence, view), sequence.arrival_index) < order

    def clean(self, view: View) -> None:
        """Leave out requests that wait no more."""
        left: list[Sequence] = [member[-1] for members in self._groups.values() for member in members]
        left += [
            entry[-1] for entry in self._heap if entry[-1] is entry[-2] and self._newest.get(entry[-1]) == entry[2]
        ]
        for part in (self._heap, self._horizons, self._newest, self._groups):
            part.clear()
        self._num_grouped = 0
        for sequence in left:
            if sequence.state is State.WAITING:
                self.push(sequence, view)

    def _enter(self, item: Item, sequence: Sequence, view: View) -> None:
        """Where the present key of a request belongs; an older entry counts no more."""
        self._num_entries += 1
        number = self._newest[item] = self._num_entries
        entry: Any = (self._policy.key(sequence, view), sequence.arrival_index, number, sequence, item)
        heapq.heappush(self._heap, entry)
        if not self._keys_grow:
            horizon = self._policy.key_horizon(sequence, view)
            if horizon < math.inf:
                heapq.heappush(self._horizons, (horizon, number, sequence, item))
        if max(len(self._heap), len(self._horizons)) > 2 * len(self._newest) + NUM_STALE:
            self._drop_old()

    def _renew(self, view: View) -> None:
        """The keys whose horizon has passed, once each: a policy may say that one is good for no time at all."""
        due: list[tuple[float, int, Sequence, Item]] = []
        while self._horizons and self._horizons[0][0] <= view.now:
            due.append(heapq.heappop(self._horizons))
        for _, number, sequence, item in due:
            if self._newest.get(item) != number:
                continue
            if item is not sequence:
                self._advance(item, view)
            elif sequence.state is State.WAITING:
                self._enter(item, sequence, view)

    def _drop_old(self) -> None:
        """Entries of which there are newer ones."""
        self._heap = [entry for entry in self._heap if self._newest.get(entry[-1]) == entry[2]]
        self._horizons = [entry for entry in self._horizons if self._newest.get(entry[-1]) == entry[1]]
        heapq.heapify(self._heap)
        heapq.heapify(self._horizons)


class WaitingLines:
    """A `WaitingOrder` for each line of a policy (`KeyPolicy.line`). Next is the first one of all lines that are not closed.

    Looking for it costs by the number of lines that have a request in them.
    """

    def __init__(self, policy: KeyPolicy) -> None:
        self._policy = policy
        self._main = WaitingOrder(policy)
        self._lines: dict[Hashable, WaitingOrder] = {None: self._main}
        """By name. Only the main line, which is None, is kept while it is empty."""
        self._head = self._main
        """The line of the request that `head` has just returned."""
        self._closed: list[WaitingOrder] = []

    @property
    def only(self) -> WaitingOrder | None:
        """The one line that there is, if there are no others."""
        return self._main if len(self._lines) == 1 else None

    def __len__(self) -> int:
        """Requests in it, those that wait no more included."""
        return sum(len(line) for line in self._lines.values())

    def push(self, sequence: Sequence, view: View) -> None:
        """A request waits, and is in no line yet."""
        name = self._policy.line(sequence, view)
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = WaitingOrder(self._policy)
        line.push(sequence, view)

    def head(self, view: View) -> Sequence | None:
        """The next request of those in lines that are not closed; it stays where it is."""
        if len(self._lines) == 1:
            self._head = self._main
            return None if self._closed else self._main.head(view)
        found: Sequence | None = None
        first: tuple[SortKey, int] | None = None
        empty: list[Hashable] = []
        for name, line in self._lines.items():
            if line in self._closed:
                continue
            sequence = line.head(view)
            if sequence is None:
                empty.append(name)
                continue
            place = line.head_key, sequence.arrival_index
            if first is None or place < first:
                found, first, self._head = sequence, place, line
        for name in empty:
            if name is not None:
                del self._lines[name]
        return found

    @property
    def head_key(self) -> SortKey:
        """Of the request that `head` has just returned."""
        return self._head.head_key

    def pop(self, view: View) -> None:
        """Take out the request that `head` has just returned."""
        self._head.pop(view)

    def close(self) -> None:
        """Leave the line of the request that `head` has just returned alone until `reopen`."""
        self._closed.append(self._head)

    def reopen(self) -> None:
        """Every line that was closed."""
        self._closed.clear()

    def before(self, order: tuple[SortKey, int], view: View) -> Iterator[Sequence]:
        """Requests that wait and come before this (key, arrival), in any order."""
        for line in self._lines.values():
            yield from line.before(order, view)

    def clean(self, view: View) -> None:
        """Leave out requests that wait no more."""
        for line in self._lines.values():
            line.clean(view)
