"""Latency-sensitive requests and best-effort ones on one engine (HyGen, NeurIPS 2025; ConServe, ICML 2026).

The sensitive ones (`is_latency_sensitive=True`) go first and displace the others when slots, blocks or tokens are out. The
others fill what a step has left: it is as large as the next token of a sensitive stream allows, by prediction. They leave
`reserve` of the KV blocks free, so that a sensitive request that comes seldom has to wait for a preemption.
"""

from __future__ import annotations

import math

from actorllm.scheduling.deadlines import Deadlines, first_due
from actorllm.scheduling.policy import Admit, Budget, KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_time import Pace, Predicts


class Cohost(KeyPolicy):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "cohost"
    ignores_decode_steps = True
    safety = 1.2
    reserve = 0.1

    def __init__(self, step_time: Predicts | None = None) -> None:
        self._deadlines = Deadlines("first")
        self._pace = Pace(step_time, self.safety)

    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (not sequence.submit.is_latency_sensitive, first_due(sequence))

    def preempt_for(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        return sequence.submit.is_latency_sensitive and not victim.submit.is_latency_sensitive

    def admit(self, sequence: Sequence, view: View) -> Admit:
        if sequence.submit.is_latency_sensitive or view.batch.num_free_slots == view.limits.max_seqs:
            return Admit.ADMIT
        left = view.kv.num_free - view.admission_blocks(sequence)
        return Admit.ADMIT if left >= self.reserve * view.kv.pool.num_blocks else Admit.WAIT

    def budget(self, view: View) -> Budget:
        until = self._deadlines.next_due(view).min(initial=math.inf)
        return Budget(self._pace.largest(view, float(until)), view.limits.prefill_chunk)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self._deadlines.on_admit(sequence, view)

    def on_step(self, done: StepDone, view: View) -> None:
        if done.num_prefill_tokens:
            self._deadlines.on_step(done, view)
            self._pace.on_step(done, view)
