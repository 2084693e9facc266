"""`RequestCounters`: how requests ended and how long they took, added up for a metrics endpoint. Pure.

Kept in the scheduler's process, where all frontends' requests are, so that one answer covers all of them. The counts begin anew
with the scheduler. An end costs one tuple: the sums are made many at a time. Called by the scheduler actor.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import DEADLINE_PASSED
from actorllm.scheduling.events import End
from actorllm.scheduling.telemetry.request_log import RequestLog
from actorllm.types.objective import READINGS, SLO

FOLD = 256
"""Ends that are added up at a time."""
MAX_VALUE = 1e15
"""Larger values count as this. An attached program makes up its times of arrival, and their sum must not overflow."""

MAX_OPEN = 4096
"""Requests of several sequences whose ends are awaited; of the oldest beyond them the rest has moved to another scheduler."""

_TIMES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHORT_TIMES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
_COUNTS = tuple(digit * 10**exponent for exponent in range(6) for digit in (1, 2, 5))

BOUNDS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _SHORT_TIMES,
    "request_time_per_output_token_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    ),
    "e2e_request_latency_seconds": _TIMES,
    "request_intake_time_seconds": _SHORT_TIMES,
    "request_queue_time_seconds": _TIMES,
    "request_inference_time_seconds": _TIMES,
    "request_prefill_time_seconds": _TIMES,
    "request_decode_time_seconds": _TIMES,
    "request_prompt_tokens": _COUNTS,
    "request_generation_tokens": _COUNTS,
    "request_prefill_kv_computed_tokens": _COUNTS,
    "request_params_max_tokens": _COUNTS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_max_num_generation_tokens": _COUNTS,
    "request_num_preemptions": (0, 1, 2, 5, 10, 20, 50),
}
"""Histograms under vLLM's names, with vLLM's upper bounds of their buckets; there is one bucket more, without a bound.

The time to the first token is intake (ours: until the scheduler has the request), queue and prefill.
"""

OF_REQUESTS = {
    "request_params_n": "Sequences of requests that ended.",
    "request_max_num_generation_tokens": "Tokens of the longest sequence of requests that ended.",
}
"""What is said of those that a request of several sequences is in once; it is in the others with each sequence."""


class RequestCounters:
    def __init__(self) -> None:
        self.log: RequestLog | None = None
        """For a reader of single requests; None: there is none."""
        self._reasons: Counter[str] = Counter()
        self._num_promised = 0
        self._num_kept = dict.fromkeys(READINGS, 0)
        self._ends: list[tuple[float | None, ...]] = []
        self._open: dict[tuple[int, int], tuple[int, int]] = {}
        """Of requests that have ended in part, by their first sequence: how many have, and the tokens of the longest."""
        self._counts = {name: np.zeros(len(bounds) + 1, np.int64) for name, bounds in BOUNDS.items()}
        self._sums = dict.fromkeys(BOUNDS, 0.0)

    def add(self, end: End, num_output: int) -> None:
        """num_output: tokens of its output; negative when that is not known, because it was cut short."""
        sequence = end.sequence
        submit = sequence.submit
        scheduled, first = sequence.scheduled, sequence.first_token
        if scheduled is not None and first is not None and first < scheduled:
            scheduled = None  # it had its first slot from a scheduler that died; when is not known
        has_moved = submit.is_resumed or (first is not None and first < sequence.queued)  # from a scheduler that died
        self._reasons[end.reason] += 1
        self._ends.append(
            (
                submit.arrival,
                None if has_moved else sequence.queued,
                scheduled,
                first,
                sequence.last_token,
                submit.prompt.size,
                num_output if num_output >= 0 else None,
                sequence.num_preemptions,
                submit.prompt.size - sequence.num_cached_tokens if sequence.scheduled is not None else None,
                submit.max_tokens,
                *self._of_request(end, num_output),
            )
        )
        if submit.slo is not None:
            self._judge(end, sequence.slo, num_output)
        if self.log is not None:
            self.log.add(end, num_output)
        if len(self._ends) >= FOLD:
            self._fold()

    def _of_request(self, end: End, num_output: int) -> tuple[int | None, int | None]:
        """Where the last sequence of a request ends: how many it had, and the tokens of the longest."""
        submit, (frontend, rid) = end.sequence.submit, end.sequence.key
        num_ended, longest = 1, num_output
        if submit.num_sequences > 1:
            if submit.is_resumed:  # how many of the others had ended is not known
                return None, None
            first = (frontend, rid if submit.fork_of is None else submit.fork_of)
            num_before, longest_before = self._open.pop(first, (0, -1))
            num_ended, longest = num_before + 1, max(longest_before, num_output)
            if num_ended < submit.num_sequences:
                self._open[first] = (num_ended, longest)
                if len(self._open) > MAX_OPEN:
                    del self._open[next(iter(self._open))]
                return None, None
        return num_ended, longest if longest >= 0 else None

    def _judge(self, end: End, slo: SLO | None, num_output: int) -> None:
        """Whether a promise was kept; of requests that were aborted it is not known."""
        if slo is None or (end.reason == "abort" and end.stop_reason != DEADLINE_PASSED):
            return
        self._num_promised += 1
        sequence = end.sequence
        first, last = sequence.first_token, sequence.last_token
        if end.reason in ("abort", "error") or first is None or last is None:
            return
        for reading in READINGS:
            self._num_kept[reading] += slo.is_met(
                arrival=sequence.arrival,
                first_token=first,
                last_token=last,
                num_prompt=sequence.num_prompt,
                num_output=num_output,
                reading=reading,
            )

    def _fold(self) -> None:
        ends, self._ends = self._ends, []
        columns = np.array(ends, np.float64).T
        arrival, queued, scheduled, first, last, num_prompt, num_output, *others = columns
        num_preemptions, num_computed, max_tokens, num_sequences, longest = others
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            self._observe("time_to_first_token_seconds", first - arrival)
            self._observe("request_time_per_output_token_seconds", ((last - first) / (num_output - 1))[num_output > 1])
            self._observe("e2e_request_latency_seconds", last - arrival)
            self._observe("request_intake_time_seconds", queued - arrival)
            self._observe("request_queue_time_seconds", scheduled - queued)
            self._observe("request_inference_time_seconds", last - scheduled)
            self._observe("request_prefill_time_seconds", first - scheduled)
            self._observe("request_decode_time_seconds", last - first)
        self._observe("request_prompt_tokens", num_prompt)
        self._observe("request_generation_tokens", num_output)
        self._observe("request_prefill_kv_computed_tokens", num_computed)
        self._observe("request_params_max_tokens", max_tokens)
        self._observe("request_params_n", num_sequences)
        self._observe("request_max_num_generation_tokens", longest)
        self._observe("request_num_preemptions", num_preemptions)

    def _observe(self, name: str, values: NDArray[np.float64]) -> None:
        """What is not a number did not happen."""
        values = np.clip(values[~np.isnan(values)], -MAX_VALUE, MAX_VALUE)
        bounds = BOUNDS[name]
        self._counts[name] += np.bincount(np.searchsorted(bounds, values), minlength=len(bounds) + 1)
        self._sums[name] += math.fsum(values)

    def promises(self) -> dict[str, Any]:
        """How many sequences with an objective have ended, and how many of them kept it, by reading."""
        return {"num_promised": self._num_promised, "num_kept": dict(self._num_kept)}

    def statistics(self) -> dict[str, Any]:
        """Counters since the start; histograms as the counts of BOUNDS' buckets, and sums."""
        if self._ends:
            self._fold()
        return {
            "finished": dict(self._reasons),
            "slo_promised": self._num_promised,
            "slo_kept": dict(self._num_kept),
            "histograms": {
                name: {"counts": counts.tolist(), "sum": self._sums[name]} for name, counts in self._counts.items()
            },
        }
