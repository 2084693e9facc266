"""Shortest remaining prefill first: the best mean time to first token, and long prompts starve under load.

The prefill counterpart of shortest remaining processing time (Schrage 1968). Tokens that are cached when a request comes to
wait count as done. What others compute of its prompt while it waits does not change its place.
"""

from __future__ import annotations

from actorllm.scheduling.policy import KeyPolicy, SortKey, View
from actorllm.scheduling.sequence import Sequence


class Srpf(KeyPolicy):
    """The longest prompt is preempted first."""

    name = "srpf"

    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (view.remaining(sequence),)

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        return (sequence.num_prompt, sequence.arrival_index)
