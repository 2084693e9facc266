"""Priorities, lower is sooner: `priority=` of a request, ties by `arrival_time` (vLLM's policy of that name); may age.

The arrival is when the caller asked, or what the caller says. The order in which requests reach the scheduler decides only what
is left. So the order is the same with the next scheduler after a death, however many frontends submit to it.

With `ageing_s`, so many seconds of waiting are worth one level. A request that arrives that much later must be a level more
urgent to come first. All age alike, so the order of two requests never changes, and none waits for ever.
"""

from __future__ import annotations

from actorllm.scheduling.policy import KeyPolicy, SortKey, View
from actorllm.scheduling.sequence import Sequence


class Priority(KeyPolicy):
    """A waiting request displaces the least urgent running one, the latest of equals, but never one of its own priority.

    Nor one that has become more urgent by its age.
    """

    name = "priority"
    ageing_s = 0.0
    """0: no request ages, and the low priorities may starve, as in vLLM."""

    def key(self, sequence: Sequence, view: View) -> SortKey:
        priority = sequence.priority
        return (priority + sequence.arrival / self.ageing_s if self.ageing_s else priority, sequence.arrival)

    def preempt_for(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        is_above = sequence.priority < victim.priority
        return is_above and self.key(sequence, view) < self.key(victim, view)
