"""Priorities, lower is sooner: `priority=` of a request, ties by arrival (vLLM's policy of that name)."""

from __future__ import annotations

from actorllm.scheduling.policy import KeyPolicy, SortKey, View
from actorllm.scheduling.sequence import Sequence


class Priority(KeyPolicy):
    """A waiting request displaces the least urgent running one, the latest of equals, but never one of its own priority."""

    name = "priority"

    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (sequence.submit.priority,)

    def preempt_for(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        return sequence.submit.priority < victim.submit.priority
