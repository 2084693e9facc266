"""What clients do that wait for answers: the next turn of a session, and a bound on the requests under way. Pure.

`ClosedLoop` says which request is sent next and when, as far as that is known; it is told what has ended. The simulator and the
live replay ask the same object.

`Contexts` has the block hashes of simulated prompts that begin with an earlier prompt and its output. The scheduler
publishes output under the hashes of its token ids, so a later turn finds it as on a live engine.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from actorllm.errors import ConfigError
from actorllm.kvcache.prefix_index import HASH_BYTES, continue_hashes, extra_key, first_digest
from actorllm.messages import I32, NO_I32
from actorllm.slo.workload import Workload


class ClosedLoop:
    """Which request of a workload is sent next.

    max_concurrency: requests under way at a time; the others wait, in the order in which they are due. None: any number.
    """

    def __init__(self, workload: Workload, max_concurrency: int | None = None) -> None:
        """Raises ConfigError for a max_concurrency that is no number of requests."""
        if max_concurrency is not None and (type(max_concurrency) is not int or max_concurrency < 1):
            raise ConfigError(f"max_concurrency={max_concurrency!r} must be a number of requests, 1 or more")
        self._most = math.inf if max_concurrency is None else max_concurrency
        self.num_under_way = 0
        """Requests that were sent and have not ended."""
        self._last_end = -math.inf
        turns = workload.turns
        arrival = workload.arrival.tolist()
        begins = np.ones(len(workload), np.bool_) if turns is None else turns.begins
        self._due: list[tuple[float, int]] = [(arrival[row], row) for row in np.flatnonzero(begins).tolist()]
        """A heap of the requests that nothing but time and the bound keep back."""
        self._think_s: list[float] = [] if turns is None else turns.think_s.tolist()
        self._num_missing: list[int] = [] if turns is None else np.diff(turns.starts).tolist()
        """By row: parents that have not ended."""
        self._children: dict[int, list[int]] = {}
        if turns is not None:
            for row in np.flatnonzero(~begins).tolist():
                for parent in turns.parents_of(row):
                    self._children.setdefault(parent, []).append(row)

    @property
    def next_at(self) -> float:
        """When the next request is to be sent; infinity: nothing is left, or only what waits for an end."""
        if not self._due or self.num_under_way >= self._most:
            return math.inf
        return max(self._due[0][0], self._last_end) if self._most < math.inf else self._due[0][0]

    def pop(self) -> tuple[int, float]:
        """The request that is sent now, at `next_at`, and since when it would have been sent without the bound."""
        self.num_under_way += 1
        due, row = heapq.heappop(self._due)
        return row, due

    def on_end(self, row: int, at: float, *, is_finished: bool) -> None:
        """A request has ended. If it did not finish, its session ends with it."""
        self.num_under_way -= 1
        self._last_end = max(self._last_end, at)
        for child in self._children.pop(row, ()):
            if not is_finished:
                self._num_missing[child] = -1  # never sent
                continue
            if self._num_missing[child] > 0:
                self._num_missing[child] -= 1
                if self._num_missing[child] == 0:
                    heapq.heappush(self._due, (at + self._think_s[child], child))


class Contexts:
    """Block hashes of the prompts of a workload with turns.

    Token ids of prompts are zeros, so what is new of a prompt is hashed as ids that no other prompt has.
    """

    def __init__(self, workload: Workload, block_size: int) -> None:
        assert workload.turns is not None
        self._turns = workload.turns
        self._num_prompt = workload.num_prompt.tolist()
        self._prefixes = workload.prefixes
        self._block_size = block_size
        self._salts: dict[int, str] = {}
        self._prompts: dict[int, bytes] = {}
        """Of requests under way: the hashes of their prompts."""
        self._histories: dict[int, tuple[bytes, I32]] = {}
        """Of requests that have ended and are to be continued: the hashes of prompt and output, and the ids behind the last
        block."""
        first = self._turns.parents[self._turns.starts[:-1][~self._turns.begins]]
        self._num_continued: list[int] = np.bincount(first, minlength=len(workload)).tolist()
        """By row: requests to come whose prompts begin with this one."""

    def salt(self, row: int) -> str:
        """Tells its session from others, whose prompts are zeros as well."""
        found = self._salts.get(row)
        if found is None:
            parents = self._turns.parents_of(row)
            found = self._salts[row] = self.salt(parents[0]) if parents else str(row)
        return found

    def hashes(self, row: int, number: int) -> bytes:
        """Of the prompt of a request that is sent now."""
        size, num_prompt = self._block_size, self._num_prompt[row]
        parents = self._turns.parents_of(row)
        if parents:
            found, tail = self._histories[parents[0]]
            self._num_continued[parents[0]] -= 1
            if not self._num_continued[parents[0]]:
                del self._histories[parents[0]]
            most = num_prompt // size * HASH_BYTES
            if len(found) > most:  # a prompt may leave out the end of what was said
                found, tail = found[:most], NO_I32
        else:
            found = b"" if self._prefixes is None else self._prefixes.block_hashes(row, num_prompt, size).tobytes()
            tail = NO_I32
        # What is new of it is no other request's.
        done = len(found) // HASH_BYTES * size
        num_new = num_prompt // size * size - done
        if num_new > 0:
            new = np.full(num_new, -1 - number, np.int32)
            new[: tail.size] = tail[:num_new]
            found += continue_hashes(found[-HASH_BYTES:] or self._first(row), new, size)
        self._prompts[row] = found
        return found

    def _first(self, row: int) -> bytes:
        return first_digest(extra_key(self.salt(row)))

    def on_end(self, row: int, output_id: int, num_output: int) -> None:
        """A request has ended, with so many tokens of one id."""
        found = self._prompts.pop(row)
        if not self._num_continued[row]:
            return
        size = self._block_size
        tail = np.zeros(self._num_prompt[row] - len(found) // HASH_BYTES * size + num_output, np.int32)
        tail[tail.size - num_output :] = output_id
        num_full = tail.size // size * size
        if num_full:
            found += continue_hashes(found[-HASH_BYTES:] or self._first(row), tail[:num_full], size)
        self._histories[row] = found, tail[num_full:]
