"""`Expiry`: which requests must have ended by when.

Owns the order of the deadlines of the requests alive. The entry of a request that ended stays until it is the next one due, or
until such entries are the most. So both ends of a request's life cost O(log n) at most, and the requests alive bound the
entries. Used by Scheduler. Its caller asks `next_at`, which costs a float comparison where no request has a deadline.
"""

from __future__ import annotations

import heapq
import math

from actorllm.scheduling.sequence import Sequence, State

MIN_ENTRIES = 64
"""So few are never cleared out."""


class Expiry:
    """The deadlines of requests alive."""

    __slots__ = ("_entries", "next_at", "num_alive")

    def __init__(self) -> None:
        self.next_at = math.inf
        """No request is due before; one may be due then."""
        self.num_alive = 0
        self._entries: list[tuple[float, int, Sequence]] = []

    def add(self, sequence: Sequence) -> bool:
        """A request that has just come alive. Returns whether it has a deadline."""
        deadline = sequence.submit.deadline
        if deadline is None:
            return False
        self.num_alive += 1
        heapq.heappush(self._entries, (deadline, sequence.arrival_index, sequence))
        self.next_at = min(self.next_at, deadline)
        return True

    def discard(self, sequence: Sequence) -> None:
        """A request with a deadline that has just ended."""
        self.num_alive -= 1
        if len(self._entries) > max(MIN_ENTRIES, 2 * self.num_alive):
            self._entries = [entry for entry in self._entries if entry[2].state is not State.FINISHED]
            heapq.heapify(self._entries)

    def take_due(self, now: float) -> list[Sequence]:
        """The requests whose deadline has passed, the earliest first; each is returned once."""
        entries, due = self._entries, []
        while entries and (entries[0][0] <= now or entries[0][2].state is State.FINISHED):
            sequence = heapq.heappop(entries)[2]
            if sequence.state is not State.FINISHED:
                due.append(sequence)
        self.next_at = entries[0][0] if entries else math.inf
        return due
