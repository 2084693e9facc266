"""Earliest deadline first (Liu and Layland 1973): of the first token, or of the end where only that is promised.

A request with a promise per token alone is due when it arrives (`deadlines.first_due`).
"""

from __future__ import annotations

from actorllm.scheduling.deadlines import first_due
from actorllm.scheduling.policy import KeyPolicy, SortKey, View
from actorllm.scheduling.sequence import Sequence


class Edf(KeyPolicy):
    """Requests without a promise come after all that have one; the latest deadline is preempted first."""

    name = "edf"

    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (first_due(sequence),)
