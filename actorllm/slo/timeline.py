"""`RunTimeline`: what became of every request of a run, live or simulated, as columns; and when every token came.

One row per request, in the order of the workload. A token comes with a step, so the times of tokens are not kept apart.
`step_ends` has the end of every step of a replica. A *span* says that a request got one token in each of so many
consecutive steps. An uninterrupted stream is one span; a preemption, or a step that a policy skipped, begins another.
That is how a million requests with 200 million tokens fit into some hundred megabytes.

Times are seconds of the run's own clock, which begins at 0. NaN: did not happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64, I32, I64

FINISHED, ABORTED, FAILED, UNFINISHED = 0, 1, 2, 3
"""How a request ended. UNFINISHED: it was still there when the run was cut off."""
MANY_STEPS = 1 << 20
LONG_GAP_S = 10.0
OUTCOMES = ("finished", "aborted", "failed", "unfinished")


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Rows are sorted by request, and those of one request by time."""

    request: I32
    replica: I32
    first_step: I64
    """Position in the replica's `step_ends`."""
    count: I32

    @staticmethod
    def sorted(request: I32, replica: I32, first_step: I64, count: I32) -> Spans:
        order = np.argsort(request, kind="stable")
        return Spans(request[order], replica[order], first_step[order], count[order])

    def by_time(self, step_ends: Sequence[F64]) -> Spans:
        """Those of one request in the order in which its tokens came, whichever replica gave them."""
        if not self.request.size:
            return self
        firsts = np.zeros(self.request.size)
        for number, ends in enumerate(step_ends):
            mine = self.replica == number
            firsts[mine] = ends[self.first_step[mine]]
        order = np.lexsort((firsts, self.request))
        return Spans(self.request[order], self.replica[order], self.first_step[order], self.count[order])

    def of(self, mine: NDArray[np.bool_]) -> Spans:
        """Those of some requests."""
        rows = mine[self.request]
        return Spans(self.request[rows], self.replica[rows], self.first_step[rows], self.count[rows])


@dataclass(frozen=True, slots=True, eq=False)
class RunTimeline:
    """See the module docstring."""

    arrival: F64
    num_prompt: I32
    num_output: I32
    """Tokens that it got."""
    scheduled: F64
    first_token: F64
    last_token: F64
    end: F64
    outcome: NDArray[np.int8]
    replica: I32
    num_preemptions: I32
    num_cached: I32
    """Prompt tokens found in the prefix cache at its first admission."""
    num_wasted: I32
    """Tokens that were computed for it in vain."""
    spans: Spans
    step_ends: tuple[F64, ...] = field(default=())
    """Of every replica, when what it gives is with its clients."""
    deliver_s: float = 0.0
    """So much earlier the steps themselves end; 0 where the clients' times are all that is known."""

    def __len__(self) -> int:
        return self.arrival.size

    @property
    def duration(self) -> float:
        """From the first arrival to the last end."""
        return float(np.nanmax(self.end) - self.arrival.min()) if len(self) and np.isfinite(self.end).any() else 0.0

    @property
    def last(self) -> float:
        """The last thing that happened; 0 of nothing."""
        times = (self.arrival, self.scheduled, self.end, *self.step_ends)
        return max((float(np.fmax.reduce(column, initial=0.0)) for column in times), default=0.0)

    @property
    def ttft(self) -> F64:
        return self.first_token - self.arrival

    @property
    def e2e(self) -> F64:
        return self.last_token - self.arrival

    @property
    def tpot(self) -> F64:
        """Mean gap between the tokens of each request; 0 with a single token, as in `vllm bench serve`."""
        gaps = np.maximum(self.num_output - 1, 1)
        return np.where(self.num_output > 1, (self.last_token - self.first_token) / gaps, self.ttft * 0.0)

    def token_times(self, request: int) -> F64:
        """When each of its tokens came."""
        spans = self.spans
        first, last = np.searchsorted(spans.request, [request, request + 1])
        parts = [
            self.step_ends[spans.replica[i]][spans.first_step[i] : spans.first_step[i] + spans.count[i]]
            for i in range(first, last)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    @property
    def pauses(self) -> F64:
        """The 99th percentile of the gaps between the tokens of each request: what its reader sees of the worst; NaN without
        a gap. Looks at every token."""
        found = np.full(len(self), np.nan)
        for row in np.flatnonzero(self.num_output > 1).tolist():
            gaps = np.sort(np.diff(self.token_times(row)))
            at = 0.99 * (gaps.size - 1)
            low = int(at)
            high = min(low + 1, gaps.size - 1)
            found[row] = gaps[low] + (gaps[high] - gaps[low]) * (at - low)
        return found

    def gaps(self, mine: NDArray[np.bool_] | None = None) -> tuple[F64, I64]:
        """Every gap between two tokens of one request (inter-token latency): values, and how often each occurs.

        mine: of these requests; None: of all.

        Requests that decode together share the gaps of their steps, so this is by steps and not by tokens. Of a run with many
        steps, those of all replicas together, they are rounded to microseconds, or there would be as many values as steps.
        """
        spans = self.spans if mine is None else self.spans.of(mine)
        values: list[F64] = []
        counts: list[I64] = []
        if sum(ends.size for ends in self.step_ends) > MANY_STEPS:
            rounded = _rounded_gaps(self._covered(spans))
            values.append(rounded[0])
            counts.append(rounded[1])
        else:
            for ends, covering in self._covered(spans):
                has_any = covering[1 : ends.size] > 0
                values.append(np.diff(ends)[has_any])
                counts.append(covering[1 : ends.size][has_any].astype(np.int64))
        again = np.flatnonzero(spans.request[1:] == spans.request[:-1])  # from one span of a request to its next
        if again.size:
            between = [
                self.step_ends[spans.replica[i + 1]][spans.first_step[i + 1]]
                - self.step_ends[spans.replica[i]][spans.first_step[i] + spans.count[i] - 1]
                for i in again.tolist()
            ]
            values.append(np.array(between))
            counts.append(np.ones(again.size, np.int64))
        if not values:
            return np.zeros(0), np.zeros(0, np.int64)
        return np.concatenate(values), np.concatenate(counts)

    def _covered(self, spans: Spans) -> Iterator[tuple[F64, I32]]:
        """Of each replica, when its steps end and how many requests have a gap that ends with each of them."""
        for replica, ends in enumerate(self.step_ends):
            there = spans.replica == replica
            first, count = spans.first_step[there], spans.count[there]
            covering = np.zeros(ends.size + 1, np.int32)
            np.add.at(covering, first + 1, 1)
            np.add.at(covering, first + count, -1)
            np.cumsum(covering, out=covering)
            yield ends, covering


def _rounded_gaps(covered: Iterable[tuple[F64, I32]]) -> tuple[F64, I64]:
    """As in `gaps`, from the ends of steps and how many gaps end with each; those below LONG_GAP_S rounded, block by block."""
    by_microsecond = np.zeros(int(LONG_GAP_S * 1e6) + 1, np.int64)
    long: list[F64] = []
    long_counts: list[I64] = []
    for ends, covering in covered:
        for start in range(1, ends.size, MANY_STEPS):
            stop = min(start + MANY_STEPS, ends.size)
            count = covering[start:stop]
            gap = np.diff(ends[start - 1 : stop])[count > 0]
            count = count[count > 0]
            is_short = gap <= LONG_GAP_S
            found = np.bincount(np.rint(gap[is_short] * 1e6).astype(np.int64), count[is_short])
            by_microsecond[: found.size] += found.astype(np.int64)
            long.append(gap[~is_short])
            long_counts.append(count[~is_short].astype(np.int64))
    occurring = np.flatnonzero(by_microsecond)
    values = np.concatenate((occurring / 1e6, *long))
    return values, np.concatenate((by_microsecond[occurring], *long_counts))


def timeline_of_streams(arrival: F64, num_prompt: I32, streams: list[F64], **columns: object) -> RunTimeline:
    """From the token times of every request, as a client sees them (replay against an engine). No token: failed."""
    count = np.array([times.size for times in streams], np.int32)
    first = np.concatenate(([0], np.cumsum(count)[:-1])).astype(np.int64) if count.size else np.zeros(0, np.int64)
    has_any = count > 0
    nothing = np.full(count.size, np.nan)
    first_token, last_token = nothing.copy(), nothing.copy()
    for row in np.flatnonzero(has_any).tolist():
        first_token[row], last_token[row] = streams[row][0], streams[row][-1]
    zeros = np.zeros(count.size, np.int32)
    values: dict[str, object] = {
        "scheduled": nothing,
        "end": last_token,
        "outcome": np.where(has_any, FINISHED, FAILED).astype(np.int8),
        "replica": zeros,
        "num_preemptions": zeros,
        "num_cached": zeros,
        "num_wasted": zeros,
    }
    rows = np.flatnonzero(has_any).astype(np.int32)
    return RunTimeline(
        arrival=arrival,
        num_prompt=num_prompt,
        num_output=count,
        first_token=first_token,
        last_token=last_token,
        spans=Spans(rows, np.zeros(rows.size, np.int32), first[has_any], count[has_any]),
        step_ends=(np.concatenate(streams) if streams else np.zeros(0),),
        **(values | columns),  # type: ignore[arg-type]
    )
