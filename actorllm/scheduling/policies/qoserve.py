"""QoServe (Niyama; ASPLOS 2026): deadlines and remaining work in one key, steps as large as the tightest stream allows.

    order       first deadline + alpha * remaining prompt tokens (those not cached when it came to wait): from earliest
                deadline to shortest first as alpha grows
    chunk       the largest step that is over, by prediction times `safety`, before the next token of any request is due
    relegation  a request that cannot keep its promise any more, and holds no KV, goes behind all that can

Knobs are class attributes, to be changed in a subclass; each of the three can be switched off. The published policy has
anchor "slo", which is right for readers and wrong for the mean gap (`actorllm.types.objective`): with "first" it serves both.
"""

from __future__ import annotations

import math

from actorllm.scheduling.deadlines import Anchor, Deadlines, first_due, last_due
from actorllm.scheduling.policy import Budget, KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_time import Pace, Predicts


class QoServe(KeyPolicy):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "qoserve"
    ignores_decode_steps = True  # nothing of what it decides concerns them, nor of what it learns by itself
    anchor: Anchor = "slo"
    alpha = 0.008
    """Seconds of deadline that one prompt token more is worth; the paper's value for an A100."""
    safety = 1.2
    is_dynamic = True
    """Off: steps are as large as the engine allows."""
    relegates = True

    def __init__(self, step_time: Predicts | None = None) -> None:
        self._deadlines = Deadlines(self.anchor)
        self._pace = Pace(step_time, self.safety)
        self._tokens_per_s = 8500.0
        self.ignores_decode_steps = not self._pace.is_corrected

    def due(self, sequence: Sequence) -> float:
        """What requests are ordered by, besides their work."""
        return first_due(sequence)

    def _last_chance(self, sequence: Sequence, num_tokens: int) -> float:
        """From when on it cannot keep its promise."""
        return last_due(sequence) - num_tokens / self._tokens_per_s

    def key(self, sequence: Sequence, view: View) -> SortKey:
        remaining = view.remaining(sequence)
        if sequence.slot >= 0:
            is_hopeless = bool(sequence.policy_state.get("relegated"))
        else:
            is_hopeless = self.relegates and view.now >= self._last_chance(sequence, remaining)
        return (is_hopeless, self.due(sequence) + self.alpha * remaining)

    def key_horizon(self, sequence: Sequence, view: View) -> float:
        last_chance = self._last_chance(sequence, view.remaining(sequence))
        return last_chance if self.relegates and last_chance > view.now else math.inf

    def budget(self, view: View) -> Budget:
        if not self.is_dynamic:
            return super().budget(view)
        until = self._deadlines.next_due(view).min(initial=math.inf)
        return Budget(self._pace.largest(view, float(until)), view.limits.prefill_chunk)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        last_chance = self._last_chance(sequence, sequence.num_remaining)  # what is cached takes no time
        sequence.policy_state["relegated"] = self.relegates and view.now >= last_chance
        self._deadlines.on_admit(sequence, view)

    def on_step(self, done: StepDone, view: View) -> None:
        took = done.ended - done.started
        if done.num_prefill_tokens:
            if took > 0:
                self._tokens_per_s += 0.005 * (done.num_prefill_tokens / took - self._tokens_per_s)
            self._deadlines.on_step(done, view)
        if done.num_prefill_tokens or self._pace.is_corrected:
            self._pace.on_step(done, view)
