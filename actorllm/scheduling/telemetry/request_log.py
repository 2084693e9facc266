"""`RequestLog`: the requests that ended lately, as rows for a reader that asks for them now and then. Pure.

There is none until a reader asks, and then an end costs one tuple. A reader that stops asking loses the oldest rows: as many as
MAX_ROWS and MAX_HASHES are kept. Used by the scheduler actor for shadow policies (`slo.live.shadow`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from actorllm.scheduling.events import End
from actorllm.scheduling.sequence import Sequence

MAX_ROWS = 4096
MAX_HASHES = 131_072
"""Blocks of prompts, in all rows together."""
MAX_TAKEN = 512
"""Rows of an answer; a reader asks again for the others."""
HASH_BYTES, TOLD_BYTES = 32, 7

COLUMNS = (
    *("arrival", "queued", "first_token", "last_token", "ended", "num_prompt", "num_output", "max_tokens", "reason"),
    *("slo", "is_latency_sensitive", "priority", "tenant", "type_info", "hashes"),
)


class RequestLog:
    """See the module docstring."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: of the scheduler, in seconds."""
        self._clock = clock
        self._rows: deque[tuple[Any, ...]] = deque()
        self._num_hashes = 0
        self.num_dropped = 0

    def add(self, end: End, num_output: int) -> None:
        """num_output: negative if it is not known."""
        sequence, submit = end.sequence, end.sequence.submit
        hashes = submit.block_hashes.tobytes()
        num_hashes = len(hashes) // HASH_BYTES
        self._rows.append(
            (
                *(submit.arrival, sequence.queued, sequence.first_token, sequence.last_token, self._clock()),
                *(submit.prompt.size, max(0, num_output), submit.max_tokens, end.reason),
                None if submit.slo is None else list(submit.slo),
                *(submit.is_latency_sensitive, submit.priority, submit.tenant, submit.type_info),
                hashes,
            )
        )
        self._num_hashes += num_hashes
        while len(self._rows) > MAX_ROWS or self._num_hashes > MAX_HASHES:
            self._num_hashes -= len(self._rows.popleft()[-1]) // HASH_BYTES
            self.num_dropped += 1

    def take(self, alive: Iterable[Sequence]) -> dict[str, Any]:
        """The oldest rows, MAX_TAKEN at most (`COLUMNS`), and what is still open. They are the reader's from here on.

        oldest: when the scheduler heard of the oldest request that is not in a row yet; None: all are. is_more: there are
        further rows.
        """
        rows: list[list[Any]] = []
        while self._rows and len(rows) < MAX_TAKEN:
            *values, hashes = self._rows.popleft()
            self._num_hashes -= len(hashes) // HASH_BYTES
            told = [int.from_bytes(hashes[at : at + TOLD_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]
            rows.append([*values, told])
        oldest = min((one.queued for one in alive), default=math.inf)
        oldest = min([oldest, *(row[1] for row in self._rows)])
        return {
            "rows": rows,
            "oldest": None if oldest == math.inf else oldest,
            "is_more": bool(self._rows),
            "num_dropped": self.num_dropped,
        }
