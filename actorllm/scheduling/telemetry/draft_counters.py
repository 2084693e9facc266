"""`DraftCounters`: how many drafts were checked, and how many of them were right. Used by Results. Pure."""

from __future__ import annotations

import numpy as np

from actorllm.messages import I32, I64
from actorllm.scheduling.telemetry.statistics import SpeculationStatistics


class DraftCounters:
    """most: drafts of a row."""

    def __init__(self, most: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._by_number: I64 = np.zeros(most + 1, np.int64)
        """How often a row that had drafts had so many right ones."""

    def observe(self, num_drafted: I32, counts: I32) -> None:
        """A result. num_drafted: drafts of each row; counts: tokens of each, or empty: one each."""
        had = num_drafted > 0
        num_rows = int(np.count_nonzero(had))
        self._num_drafts += num_rows
        self._num_draft_tokens += int(num_drafted.sum())
        if counts.size:
            self._by_number += np.bincount(np.maximum(counts[had] - 1, 0), minlength=self._by_number.size)
        else:
            self._by_number[0] += num_rows

    def statistics(self) -> SpeculationStatistics:
        reached = self._by_number[::-1].cumsum()[::-1][
            1:
        ]  # a row with n right ones has one at each of the first n positions
        return SpeculationStatistics(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=int(reached.sum()),
            num_accepted_tokens_per_pos=tuple(reached.tolist()),
        )
