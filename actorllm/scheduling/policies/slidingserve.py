"""SlidingServe (arXiv 2606.05933): steps planned two at a time, levels of urgency, and the largest set that can be on time.

The paper: "SlidingServe can improve service capacity by up to 30% compared to advanced scheduling systems under various load
conditions". Its code is not public. What its abstract says is done here as follows:

    chunks   of all pairs of sizes for this step and the next one, that with the most prompt tokens, such that both end before
             the tokens are due which they bring. A pair with no more tokens than wait is enough
    levels   requests at risk, whose last chance to start is within `risk_s`; then all others by deadline and work, as by
             QoServe; then those that can keep no promise any more
    rescue   if requests at risk cannot all be on time, the largest set that can (`scheduling.on_time`) goes first, and the others
             of them wait behind the second level
"""

from __future__ import annotations

import math

import numpy as np

from actorllm.scheduling.deadlines import last_due
from actorllm.scheduling.on_time import most_on_time
from actorllm.scheduling.policies.qoserve import QoServe
from actorllm.scheduling.policy import Admit, Budget, SortKey, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_time import Predicts

AT_RISK, NORMAL, HOPELESS = 0, 1, 2


class SlidingServe(QoServe):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "slidingserve"
    alpha = 0.0005
    risk_s = 0.25
    most_rescued = 32
    """So many requests at risk are looked at together; what that costs grows by the square."""

    def __init__(self, step_time: Predicts | None = None) -> None:
        super().__init__(step_time)
        self._at_risk: dict[Sequence, None] = {}
        """Waiting requests whose key said so, in the order in which it did."""
        self._left_behind: set[Sequence] = set()

    def _level(self, sequence: Sequence, view: View) -> int:
        left = self._last_chance(sequence, view.remaining(sequence)) - view.now
        if left <= 0 and self.relegates and sequence.slot < 0:
            return HOPELESS
        is_at_risk = left <= self.risk_s and math.isfinite(left) and sequence not in self._left_behind
        return AT_RISK if is_at_risk else NORMAL

    def key(self, sequence: Sequence, view: View) -> SortKey:
        level = self._level(sequence, view)
        if level == AT_RISK:
            if sequence.slot < 0:
                self._at_risk[sequence] = None
            return (level, self.due(sequence))
        return (level, self.due(sequence) + self.alpha * view.remaining(sequence))

    def key_horizon(self, sequence: Sequence, view: View) -> float:
        if sequence in self._left_behind:  # that is decided anew in each step
            return math.nextafter(view.now, math.inf)
        left = self._last_chance(sequence, view.remaining(sequence))
        if left - self.risk_s > view.now:
            return left - self.risk_s
        return left if self.relegates and left > view.now else math.inf

    def budget(self, view: View) -> Budget:
        self._rescue(view)
        if not self.is_dynamic:
            return super().budget(view)
        return Budget(self._two_steps(view), view.limits.prefill_chunk)

    def _two_steps(self, view: View) -> int:
        """Tokens of this step, of the best pair with the next one."""
        num_decode, start = view.decode_slots.size, self._pace.free_at(view)
        first = float(self._deadlines.next_due(view).min(initial=math.inf)) - start
        second = float(self._deadlines.next_due(view, ahead=1).min(initial=math.inf)) - start
        sizes = self._pace.sizes(view)
        safety = self._pace.safety
        best, chosen = (-1.0, 0.0), sizes[-1]
        for size, seconds in sizes:
            if safety * seconds > first:
                continue
            # The largest one behind it that is in time, too; without any, the next step has decode rows alone.
            then = next((other for other in sizes if safety * (seconds + other[1]) <= second), None)
            tokens = size - num_decode + (0 if then is None else max(0, then[0] - num_decode))
            took = seconds + (0.0 if then is None else then[1])
            if (tokens, -took) > best:
                best, chosen = (tokens, -took), (size, seconds)
        self._pace.expect(chosen[1], view)
        return chosen[0]

    def _rescue(self, view: View) -> None:
        for sequence in [s for s in self._at_risk if last_due(s) <= view.now]:
            del self._at_risk[sequence]
        waiting = list(self._at_risk)
        self._left_behind = set()
        if len(waiting) < 2:
            return
        looked_at = waiting[: self.most_rescued]
        work = np.array([view.remaining(s) for s in looked_at]) / self._tokens_per_s
        due = np.array([last_due(s) for s in looked_at]) - view.now
        chosen = most_on_time(work, due)
        if chosen.any():
            self._left_behind = {s for s, is_chosen in zip(looked_at, chosen.tolist(), strict=True) if not is_chosen}

    def admit(self, sequence: Sequence, view: View) -> Admit:
        return Admit.SKIP if sequence in self._left_behind else Admit.ADMIT

    def on_admit(self, sequence: Sequence, view: View) -> None:
        super().on_admit(sequence, view)
        self._at_risk.pop(sequence, None)

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._at_risk.pop(sequence, None)
        self._left_behind.discard(sequence)
