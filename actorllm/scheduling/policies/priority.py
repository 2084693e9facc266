"""Priorities, lower is sooner: `priority=` of a request, ties by `arrival_time` (vLLM's policy of that name).

That is when the caller asked, or what he says; the order in which requests reach the scheduler decides only what is left. So it is
the same with the next scheduler after a death, however many frontends submit to it.
"""

from __future__ import annotations

from actorllm.scheduling.policy import KeyPolicy, SortKey, View
from actorllm.scheduling.sequence import Sequence


class Priority(KeyPolicy):
    """A waiting request displaces the least urgent running one, the latest of equals, but never one of its own priority."""

    name = "priority"

    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (sequence.submit.priority, sequence.arrival)

    def preempt_for(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        return sequence.submit.priority < victim.submit.priority
