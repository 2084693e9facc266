"""Worst case: a request that starts has room for its prompt and its `max_tokens`, whatever others use (Orca, OSDI 2022).

No request is ever preempted because running ones want memory; a policy may still displace it for others. Memory that answers
shorter than `max_tokens` would have needed stays empty.
"""

from __future__ import annotations

from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.policy import Admit, View
from actorllm.scheduling.sequence import Sequence


class WorstCase(AdmissionPolicy):
    """Counted in blocks; those that a request shares with others are needed once."""

    name = "worst-case"

    def admit(self, sequence: Sequence, joining: list[Sequence], leaving: list[Sequence], view: View) -> Admit:
        running = [s for s in view.running() if s not in leaving]
        if not running and not joining:
            return Admit.ADMIT  # a request that was taken at all fits alone
        kv = view.kv
        free = kv.num_free + sum(kv.num_exclusive(s.slot) for s in leaving)
        to_come = sum(max(0, kv.blocks_for(s.limit) - kv.num_blocks.item(s.slot)) for s in running)
        to_come += sum(blocks_at_its_end(s, view) for s in [*joining, sequence])
        return Admit.ADMIT if to_come <= free else Admit.WAIT


def blocks_at_its_end(sequence: Sequence, view: View) -> int:
    """What a waiting request takes of the free blocks until its `max_tokens`."""
    at_first = view.admission_blocks(sequence)
    return at_first + max(0, view.kv.blocks_for(sequence.limit) - sequence.num_needed_blocks)
