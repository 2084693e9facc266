"""`DraftCounters`: how many drafts were checked, and how many of them were right. Used by Results. Pure."""

from __future__ import annotations

import numpy as np

from actorllm.messages import I32, I64
from actorllm.scheduling.telemetry.statistics import SpeculationStatistics

FOLD = 256
"""Results that are added up at a time."""


class DraftCounters:
    """most: drafts of a row."""

    def __init__(self, most: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._by_number: I64 = np.zeros(most + 1, np.int64)
        """How often a row that had drafts had so many right ones."""
        self._unfolded: list[tuple[I32, I32]] = []

    def observe(self, num_drafted: I32, counts: I32) -> None:
        """A result. num_drafted: drafts of each row; counts: tokens of each, or empty: one each."""
        self._unfolded.append((num_drafted, counts if counts.size else np.ones_like(num_drafted)))
        if len(self._unfolded) >= FOLD:
            self._fold()

    def _fold(self) -> None:
        num_drafted, counts = (np.concatenate(column) for column in zip(*self._unfolded, strict=True))
        self._unfolded.clear()
        had = num_drafted > 0
        self._num_drafts += int(np.count_nonzero(had))
        self._num_draft_tokens += int(num_drafted.sum())
        self._by_number += np.bincount(np.maximum(counts[had] - 1, 0), minlength=self._by_number.size)

    def statistics(self) -> SpeculationStatistics:
        if self._unfolded:
            self._fold()
        reached = self._by_number[::-1].cumsum()[::-1][
            1:
        ]  # a row with n right ones has one at each of the first n positions
        return SpeculationStatistics(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=int(reached.sum()),
            num_accepted_tokens_per_pos=tuple(reached.tolist()),
        )
