"""FairBatching (arXiv 2510.14392): decodes that can wait give way to prompts, and steps end before the next token is due.

Token i of a request is due at arrival + ttft + i * tpot. A step may take as long as the tightest stream allows. It first has
the decode rows that are due within `horizon` such steps, then prompts in the order of their deadlines. The other decode rows
pause: a stream that is ahead of its reader loses nothing by that. All rows decode in one step of `turns`, so that requests
without a promise never stand still for ever.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.deadlines import Deadlines, first_due
from actorllm.scheduling.policy import Budget, KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_time import Pace, Predicts


class FairBatch(KeyPolicy):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "fairbatch"
    ignores_decode_steps = True  # without prompts all rows decode
    safety = 1.2
    horizon = 2.0
    turns = 4

    def __init__(self, step_time: Predicts | None = None) -> None:
        self._deadlines = Deadlines("slo")
        self._pace = Pace(step_time, self.safety)
        self.ignores_decode_steps = not self._pace.is_corrected
        self._tokens = 0
        self._num_plans = 0

    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (first_due(sequence),)

    def decode_mask(self, view: View) -> NDArray[np.bool_] | None:
        self._tokens = view.limits.max_tokens
        if not view.prefilling and not view.num_waiting:
            return None
        due = self._deadlines.next_due(view)
        start = self._pace.free_at(view)
        tightest = float(due.min(initial=math.inf))
        self._tokens = self._pace.largest(view, tightest)
        self._num_plans += 1
        if tightest == math.inf or self._num_plans % self.turns == 0:
            return None
        is_urgent: NDArray[np.bool_] = due <= start + self.horizon * max(tightest - start, 1e-3)
        return is_urgent

    def budget(self, view: View) -> Budget:
        return Budget(self._tokens, view.limits.prefill_chunk)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self._deadlines.on_admit(sequence, view)

    def on_step(self, done: StepDone, view: View) -> None:
        self._deadlines.on_step(done, view)
        if done.num_prefill_tokens or self._pace.is_corrected:
            self._pace.on_step(done, view)
