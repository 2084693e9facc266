"""`DraftCounters`: how many drafts were checked, and how many of them were right. Used by Results. Pure."""

from __future__ import annotations

import numpy as np

from actorllm.messages import I32, I64
from actorllm.scheduling.telemetry.statistics import SpeculationStatistics

FOLD = 256
"""Results that are added up at a time."""


class DraftCounters:
    """most: drafts of a row. num_slots: of requests that run."""

    def __init__(self, most: int, num_slots: int) -> None:
        self.is_used = most > 0
        """Some row may have any."""
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._by_number: I64 = np.zeros(most + 1, np.int64)
        """How often a row that had drafts had so many right ones."""
        self._num_drafted: I64 = np.zeros(num_slots, np.int64)
        """Drafts of the request that has the slot."""
        self._by_slot: I64 = np.zeros((num_slots, most + 1), np.int64)
        """How often it had so many right ones, where it had any drafts."""
        self._unfolded: list[tuple[I32, I32, I32]] = []

    def observe(self, num_drafted: I32, counts: I32, slots: I32) -> None:
        """A result. num_drafted: drafts of each row; counts: tokens of each, or empty: one each. slots: -1: of no one any more."""
        self._unfolded.append((num_drafted, counts if counts.size else np.ones_like(num_drafted), slots))
        if len(self._unfolded) >= FOLD:
            self._fold()

    def _fold(self) -> None:
        num_drafted, counts, slots = (np.concatenate(column) for column in zip(*self._unfolded, strict=True))
        self._unfolded.clear()
        # How often a slot had each number of drafts, and of right ones. The first line is of no slot any more.
        numbers = np.arange(self._by_number.size)
        shape = (self._num_drafted.size + 1, numbers.size)
        first = (slots + 1) * numbers.size
        had = np.bincount(first + num_drafted, minlength=shape[0] * shape[1]).reshape(shape)
        right = np.bincount(first + np.maximum(counts - 1, 0), minlength=shape[0] * shape[1]).reshape(shape)
        right[:, 0] -= had[:, 0]  # rows that had none
        self._num_drafted += (had @ numbers)[1:]
        self._by_slot += right[1:]
        by_drafts = had.sum(0)
        self._num_drafts += int(by_drafts[1:].sum())
        self._num_draft_tokens += int(by_drafts @ numbers)
        self._by_number += right.sum(0)

    def take(self, slot: int) -> tuple[int, list[int]]:
        """The drafts of the request that leaves a slot, and the right ones by position."""
        if self._unfolded:
            self._fold()
        drafted, accepted = int(self._num_drafted[slot]), _by_position(self._by_slot[slot])
        self._num_drafted[slot] = self._by_slot[slot] = 0
        return drafted, accepted

    def statistics(self) -> SpeculationStatistics:
        if self._unfolded:
            self._fold()
        accepted = _by_position(self._by_number)
        return SpeculationStatistics(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(accepted),
            num_accepted_tokens_per_pos=tuple(accepted),
        )


def _by_position(by_number: I64) -> list[int]:
    """Right drafts: a row with n of them has one at each of the first n positions. by_number: how often there were so many."""
    accepted: list[int] = by_number[::-1].cumsum()[::-1][1:].tolist()
    return accepted
