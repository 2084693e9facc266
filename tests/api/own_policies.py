"""A policy of the user's own, as another process loads it."""

from __future__ import annotations

from actorllm.scheduling.policy import KeyPolicy, SortKey, View
from actorllm.scheduling.sequence import Sequence


class ShortestFirst(KeyPolicy):
    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (sequence.num_prompt,)
