"""Latency-sensitive and best-effort requests on one engine (after HyGen, NeurIPS 2025, and ConServe, ICML 2026).

Sensitive requests (`is_latency_sensitive`) are served as QoServe serves them; best effort gets the time they leave, in three ways:

    prompts   come after those that are due earlier, and leave `reserve` of the KV blocks free for sensitive ones. The first
              one that cannot holds back those behind it that need about as many blocks (the same power of two), in this
              step: no step goes through all of best effort
    decode    its rows pause in steps in which a sensitive prompt waits or is computed: they cost time, and no reader waits
              for their next token. All run in one step of `turns`. A request that has used up `yields` of what it was
              promised until its end pauses no more
    memory    it is preempted when a sensitive request finds no room
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.policies.qoserve import QoServe
from actorllm.scheduling.policy import Admit, SortKey, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_time import Predicts


class Cohost(QoServe):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "cohost"
    anchor = "first"
    alpha = 0.0005
    reserve = 0.1
    turns = 8
    yields = 0.5

    def __init__(self, step_time: Predicts | None = None) -> None:
        super().__init__(step_time)
        self._is_sensitive: NDArray[np.bool_] = np.zeros(0, np.bool_)  # by slot
        self._yields_until: NDArray[np.float64] = np.zeros(0)
        self._waiting: set[Sequence] = set()
        """The sensitive ones."""
        self._num_plans = 0
        self._is_held_back = False
        """In the last plan the admission policy let the next one not start."""

    def due(self, sequence: Sequence) -> float:
        """Sensitive ones that are promised nothing are due at once."""
        due = super().due(sequence)
        return sequence.arrival if due == math.inf and sequence.is_latency_sensitive else due

    def line(self, sequence: Sequence, view: View) -> Hashable:
        """Best effort waits in lines by size."""
        if sequence.submit.is_latency_sensitive:
            return None
        return view.admission_blocks(sequence).bit_length()

    def preempt_for(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        return sequence.is_latency_sensitive and not victim.is_latency_sensitive

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        return (not sequence.is_latency_sensitive, sequence.arrival_index)

    def admit(self, sequence: Sequence, view: View) -> Admit:
        if sequence.is_latency_sensitive or view.batch.num_free_slots == view.limits.max_seqs:
            return Admit.ADMIT
        left = view.kv.num_free - view.admission_blocks(sequence)
        return Admit.ADMIT if left >= self.reserve * view.kv.pool.num_blocks else Admit.SKIP_LINE

    def decode_mask(self, view: View) -> NDArray[np.bool_] | None:
        # What waits for room that an admission policy keeps free waits for ends of running ones; pauses would put those off.
        is_held_back, self._is_held_back = self._is_held_back, False
        waits = self._waiting and not is_held_back
        if not waits and not any(s.submit.is_latency_sensitive for s in view.prefilling):
            return None
        self._num_plans += 1
        slots = view.decode_slots
        if not slots.size or self._num_plans % self.turns == 0:
            return None
        runs: NDArray[np.bool_] = self._is_sensitive[slots] | (self._yields_until[slots] <= view.now)
        return runs if runs.any() else None

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        if sequence.is_latency_sensitive:
            self._waiting.add(sequence)

    on_preempt = on_arrival

    def on_admit(self, sequence: Sequence, view: View) -> None:
        super().on_admit(sequence, view)
        if not self._yields_until.size:
            self._yields_until = np.zeros(view.limits.max_seqs)
            self._is_sensitive = np.zeros(view.limits.max_seqs, np.bool_)
        e2e = None if sequence.slo is None else sequence.slo.e2e
        self._is_sensitive[sequence.slot] = sequence.is_latency_sensitive
        self._yields_until[sequence.slot] = math.inf if e2e is None else sequence.arrival + self.yields * e2e
        self._waiting.discard(sequence)

    def on_held_back(self, sequence: Sequence, view: View) -> None:
        self._is_held_back = True

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._waiting.discard(sequence)
