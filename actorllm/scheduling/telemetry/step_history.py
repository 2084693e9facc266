"""`StepHistory`: the newest steps for the live page, and the sums of all of them for a metrics endpoint. Pure.

Kept always, so that a page that has just been opened shows the last seconds. A step costs two tuples, and the sums are made
many at a time. The gap between tokens is that between two results, counted once per decode row: a row that decodes is in every
step. Called by the scheduler actor.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.ledger import StepRecord

KEPT = 1024
FOLD = 256
"""Steps that are added up at a time."""

_TIMES = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)

STEP_BOUNDS: dict[str, tuple[float, ...]] = {
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "inter_token_latency_seconds": _TIMES,
    "step_duration_seconds": _TIMES,
}
"""Histograms, the first two under vLLM's names: upper bounds of their buckets; there is one bucket more, without a bound."""


class StepHistory:
    def __init__(self) -> None:
        self._launched: deque[tuple[int, float, int, int]] = deque()
        self._steps: deque[tuple[int, float, float, float, float, int, int]] = deque(maxlen=KEPT)
        self._unfolded: list[tuple[float, float, float, float]] = []
        self._last_at = 0.0
        self._counts = {name: np.zeros(len(bounds) + 1, np.int64) for name, bounds in STEP_BOUNDS.items()}
        self._sums = dict.fromkeys(STEP_BOUNDS, 0.0)

    def launched(self, record: StepRecord) -> None:
        self._launched.append((record.step, record.launched, record.num_decode, record.num_tokens))

    def done(self, step: int, started: float, ended: float, at: float) -> None:
        """A result. started, ended: of the worker; at: when it was here. Steps before it that had none were void."""
        launched = self._launched
        while launched and launched[0][0] < step:
            launched.popleft()
        if not launched or launched[0][0] != step:
            return  # it was void
        _, planned, num_decode, num_tokens = launched.popleft()
        self._steps.append((step, planned, started, ended, at, num_decode, num_tokens))
        self._unfolded.append((num_tokens, at - self._last_at, num_decode if self._last_at else 0, ended - started))
        self._last_at = at
        if len(self._unfolded) >= FOLD:
            self._fold()

    def newest(self, after: int, at_most: int) -> list[list[Any]]:
        """Steps with a number above `after`, the newest if there are more than at_most, in their order.

        Of each [step, planned, started, ended, done (monotonic seconds), decode rows, tokens].
        """
        found: list[list[Any]] = []
        for entry in reversed(self._steps):
            if entry[0] <= after or len(found) == at_most:
                break
            found.append(list(entry))
        return found[::-1]

    def _fold(self) -> None:
        num_tokens, gap, num_decode, duration = np.array(self._unfolded, np.float64).T
        self._unfolded = []
        self._observe("iteration_tokens_total", num_tokens, np.ones_like(num_tokens))
        self._observe("inter_token_latency_seconds", gap, num_decode)
        self._observe("step_duration_seconds", duration, np.ones_like(duration))

    def _observe(self, name: str, values: NDArray[np.float64], weights: NDArray[np.float64]) -> None:
        bounds = STEP_BOUNDS[name]
        places = np.searchsorted(bounds, values)
        self._counts[name] += np.bincount(places, weights, minlength=len(bounds) + 1).astype(np.int64)
        self._sums[name] += float(values @ weights)

    def statistics(self) -> dict[str, Any]:
        """Since the start: counts of STEP_BOUNDS' buckets, and sums."""
        if self._unfolded:
            self._fold()
        return {name: {"counts": counts.tolist(), "sum": self._sums[name]} for name, counts in self._counts.items()}
