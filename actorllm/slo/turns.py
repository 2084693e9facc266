"""`Turns`: which requests of a workload are sent when others have ended: turns of a session, tool calls of an agent.

    row  0          a session begins at its arrival
    row  1  2       two calls at once, each some seconds after row 0 has ended
    row  3          the next turn, some seconds after both of them have ended

The prompt of a turn begins with the prompt and the output of its first parent, as far as it is long enough. A parent stands
before its children. The arrival of a child is *nominal*: the time at which it would be sent if every request took no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import InvalidParameterError
from actorllm.messages import F64, I32, I64


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Request i is sent think_s[i] seconds after the last of parents[starts[i]:starts[i + 1]] has ended.

    Without a parent it is sent at its arrival, and begins a session.
    """

    parents: I32
    """Rows of the workload."""
    starts: I64
    think_s: F64
    """0 or more; without effect where there is no parent."""

    @classmethod
    def of(cls, parents: Iterable[Iterable[int]], think_s: Iterable[float]) -> Turns:
        """parents: of every request. think_s: likewise, in seconds."""
        rows = [list(own) for own in parents]
        starts = np.concatenate(([0], np.cumsum([len(own) for own in rows]))).astype(np.int64)
        return cls(
            np.array([row for own in rows for row in own], np.int32), starts, np.array(list(think_s), np.float64)
        )

    def check(self, num_requests: int, name: str) -> None:
        """Raises InvalidParameterError for what is not about so many requests, or waits for a later one."""
        if self.starts.size != num_requests + 1 or self.think_s.size != num_requests:
            raise InvalidParameterError(
                f"workload {name!r}: turns of {self.starts.size - 1} requests, arrivals of {num_requests}"
            )
        if not (np.isfinite(self.think_s).all() and (self.think_s >= 0).all()):
            raise InvalidParameterError(f"workload {name!r}: think times must be finite and 0 or more")
        children = np.repeat(np.arange(num_requests), np.diff(self.starts))
        if self.parents.size and (int(self.parents.min()) < 0 or (self.parents >= children).any()):
            wrong = int(children[np.argmax((self.parents >= children) | (self.parents < 0))])
            raise InvalidParameterError(f"workload {name!r}: request {wrong} waits for itself or for a later request")

    @property
    def begins(self) -> NDArray[np.bool_]:
        """Which requests begin a session."""
        found: NDArray[np.bool_] = np.diff(self.starts) == 0
        return found

    def parents_of(self, row: int) -> list[int]:
        found: list[int] = self.parents[self.starts[row] : self.starts[row + 1]].tolist()
        return found

    def nominal(self, arrival: F64) -> F64:
        """Arrivals, from those of the requests that begin a session; the other entries are not read."""
        times: list[float] = arrival.tolist()
        starts, parents, think_s = self.starts.tolist(), self.parents.tolist(), self.think_s.tolist()
        for row in np.flatnonzero(~self.begins).tolist():
            times[row] = max(times[parent] for parent in parents[starts[row] : starts[row + 1]]) + think_s[row]
        return np.array(times, np.float64)

    def select(self, rows: NDArray[np.intp]) -> Turns:
        """Of these requests. A request whose parents are all left out begins a session."""
        place = np.full(self.think_s.size, -1, np.int64)
        place[rows] = np.arange(rows.size)
        counts = np.diff(self.starts)[rows]
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - counts, counts)
        parents = place[self.parents[np.repeat(self.starts[:-1][rows], counts) + within]]
        is_there = parents >= 0
        left = np.bincount(np.repeat(np.arange(rows.size), counts)[is_there], minlength=rows.size)
        starts = np.concatenate(([0], np.cumsum(left))).astype(np.int64)
        return Turns(parents[is_there].astype(np.int32), starts, self.think_s[rows])

    def repeated(self, num_rounds: int) -> Turns:
        """The same sessions so many times, one round of requests after the other."""
        size, num = self.think_s.size, self.parents.size
        offset = np.arange(num_rounds)
        return replace(
            self,
            parents=(np.tile(self.parents, num_rounds) + np.repeat(offset * size, num)).astype(np.int32),
            starts=np.concatenate(([0], (self.starts[1:] + (offset * num)[:, None]).ravel())).astype(np.int64),
            think_s=np.tile(self.think_s, num_rounds),
        )
