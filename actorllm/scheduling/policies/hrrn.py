"""Highest response ratio next (Brinch Hansen 1971): shortest first, but waiting counts in proportion to the work.

(waited + work) / work, with the work of a prompt in seconds at the rate at which prompts were computed lately. No request
starves: the ratio of one that waits grows without bound.
"""

from __future__ import annotations

from collections.abc import Hashable

from actorllm.scheduling.policy import KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence


class Hrrn(KeyPolicy):
    """Ratios change all the time, so they are made anew every `refresh_s`: of equal work, that of the earliest arrival."""

    name = "hrrn"
    ignores_decode_steps = True  # they tell nothing of the rate of prompts
    refresh_s = 0.1

    def __init__(self) -> None:
        self._tokens_per_s = 10_000.0

    def key(self, sequence: Sequence, view: View) -> SortKey:
        work = view.remaining(sequence) / self._tokens_per_s
        return (-(view.now - sequence.arrival) / work if work else 0.0,)

    def key_horizon(self, sequence: Sequence, view: View) -> float:
        return view.now + self.refresh_s

    def group(self, sequence: Sequence, view: View) -> tuple[Hashable, SortKey]:
        return view.remaining(sequence), (sequence.arrival,)

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        return (sequence.arrival_index,)

    def on_step(self, done: StepDone, view: View) -> None:
        took = done.ended - done.started
        if done.num_prefill_tokens and took > 0:
            self._tokens_per_s += 0.02 * (done.num_prefill_tokens / took - self._tokens_per_s)
