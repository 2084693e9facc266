"""Credits: slow streams make room for fast ones (the TPOT guard of SCORPIO, arXiv 2505.23022).

A stream that promises a token every 100 ms needs half of the steps that one with 50 ms needs. So requests are counted by
their weight, tightest tpot / own tpot: their sum is the virtual batch size. The next request starts while steps of such a batch
stay within the tightest promise, by prediction times `safety`. When a step with all running streams would not, a stream earns
its weight in each step and runs when it has a whole credit. The batch thereby shrinks to its virtual size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.policy import Admit, StepDone, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_time import Pace, Predicts


class Credit(AdmissionPolicy):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "credit"
    ignores_decode_steps = False
    safety = 1.1
    unpromised_tpot = 0.2
    """What is taken for the promise of requests that have none: they go slowly, and they go."""

    def __init__(self, step_time: Predicts | None = None) -> None:
        self._pace = Pace(step_time, self.safety)
        self._tpot: NDArray[np.float64] = np.zeros(0)  # by slot
        self._credit: NDArray[np.float64] = np.zeros(0)
        self._prompt_tokens = 0.0
        """In a step, lately: they take their time as well."""

    def _tpot_of(self, sequence: Sequence) -> float:
        slo = sequence.slo
        return self.unpromised_tpot if slo is None or slo.tpot is None else slo.tpot

    def _fits(self, tpots: NDArray[np.float64], virtual_size: float, view: View) -> bool:
        """Whether a step of a batch of this size is over before the tightest of these streams wants its next token."""
        context = float(view.batch.num_computed[view.decode_slots].sum())
        context *= virtual_size / max(1, view.decode_slots.size)
        took = self._pace.step_time.seconds(self._prompt_tokens, virtual_size, context)
        return self.safety * took <= float(tpots.min())

    def admit(self, sequence: Sequence, joining: list[Sequence], leaving: list[Sequence], view: View) -> Admit:
        others = [s for s in view.running() if s not in leaving] + joining
        if not others:
            return Admit.ADMIT
        tpots = np.array([self._tpot_of(s) for s in [*others, sequence]])
        return Admit.ADMIT if self._fits(tpots, float((tpots.min() / tpots).sum()), view) else Admit.WAIT

    def decode_mask(self, view: View) -> NDArray[np.bool_] | None:
        slots = view.decode_slots
        if not slots.size:
            return None
        tpots = self._tpot[slots]
        if self._fits(tpots, slots.size, view):
            return None
        credit = self._credit[slots] + tpots.min() / tpots
        is_next: NDArray[np.bool_] = credit >= 1.0 - 1e-9  # the tightest always is
        self._credit[slots] = credit - is_next
        return is_next

    def on_admit(self, sequence: Sequence, view: View) -> None:
        if not self._tpot.size:
            self._tpot, self._credit = np.zeros((2, view.limits.max_seqs))
        self._tpot[sequence.slot] = self._tpot_of(sequence)
        self._credit[sequence.slot] = 0.0

    def on_step(self, done: StepDone, view: View) -> None:
        self._pace.on_step(done, view)
        self._prompt_tokens += 0.05 * (done.num_prefill_tokens - self._prompt_tokens)
