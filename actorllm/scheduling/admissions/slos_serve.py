"""SLOs-Serve (Chen et al., arXiv 2504.08784): on arrival, the largest set of requests whose promises can all be kept.

The paper: it "improves per-GPU serving capacity by 2.2x on average compared to prior state-of-the-art systems". Steps
are as long as the tightest promise per token allows. What they hold beside the decode rows is left for prompts, so the work of
each waiting prompt is known. Dynamic programming finds the most prompts that can be ready when they are due
(`scheduling.on_time`).

A request that was let in stays in while it can be on time at all. One that is not in the set is turned away at once, while
there is time to try another replica. Requests that promise no time to their first token are let in, always. So are those that a
scheduler which died had taken. Memory is left to the scheduler, and drafts, which the paper adapts as well, to speculation.
"""

from __future__ import annotations

import math

import numpy as np

from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.on_time import most_on_time
from actorllm.scheduling.policy import StepDone, View
from actorllm.scheduling.sequence import Sequence, State
from actorllm.scheduling.step_time import CHUNKS, Pace, Predicts


class SlosServe(AdmissionPolicy):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "slos-serve"
    safety = 1.1
    most_planned = 64
    """So many waiting requests are looked at together; what that costs grows by the square."""

    def __init__(self, step_time: Predicts | None = None) -> None:
        self._pace = Pace(step_time, self.safety)
        self._new: list[Sequence] = []
        """Since the last plan."""
        self._step_s = 0.0
        """Of the last steps with prompts."""
        self._let_in: list[Sequence] = []

    @staticmethod
    def _due(sequence: Sequence) -> float | None:
        slo = sequence.slo
        if slo is None or slo.ttft is None or sequence.known.size > sequence.num_prompt:
            return None
        return sequence.arrival + slo.ttft + slo.ttft_per_prompt_token * sequence.num_prompt

    def prompt_rate(self, view: View) -> float:
        """Prompt tokens per second that steps hold beside the decode rows; infinity while nothing is known of steps."""
        slots = view.decode_slots
        d, context = slots.size, int(view.batch.num_computed[slots].sum())
        paces = [s.slo.tpot for s in view.running() if s.slo is not None and s.slo.tpot is not None]
        limit = min(paces, default=math.inf)
        seconds = self._pace.step_time.seconds
        high = max(1, view.limits.max_tokens - d)
        low = min(CHUNKS[-1], high)  # steps with prompts there must be in any case
        if not seconds(high, d, context, 0, high * high / 2):
            return math.inf
        # The largest step that the tightest stream can stand.
        while low < high:
            middle = (low + high + 1) // 2
            if self.safety * seconds(middle, d, context, 0, middle * middle / 2) <= limit:
                low = middle
            else:
                high = middle - 1
        return low / (self.safety * seconds(low, d, context, 0, low * low / 2))

    def _plan(self, view: View) -> list[Sequence]:
        """Decide about those that came since the last plan, and again about those that wait. Returns those that are turned away."""
        waiting = [s for s in self._let_in if s.state is State.WAITING]
        new = [s for s in self._new if s.state is State.WAITING]
        self._new = new[self.most_planned :]
        kept = [*(s for s in view.prefilling if self._due(s) is not None), *waiting][: self.most_planned]
        looked_at = [*kept, *new[: self.most_planned]]
        rate = self.prompt_rate(view)
        work = np.array([view.remaining(s) for s in looked_at]) / rate
        # Steps in flight have no room any more, and the token of a prompt comes with the end of the step that it ends in.
        begin = view.now + (view.num_in_flight + 1) * self._step_s
        due = np.array([self._due(s) or 0.0 for s in looked_at]) - begin
        chosen = most_on_time(work, due, np.arange(len(looked_at)) < len(kept)).tolist()
        late = [s for s, is_chosen in zip(looked_at, chosen, strict=True) if not is_chosen and s.state is State.WAITING]
        declined = [s for s in late if not s.is_taken and view.may_start(s)]
        gone = set(declined)
        self._let_in = [s for s in [*waiting, *new[: self.most_planned]] if s not in gone]
        return declined

    def reject(self, view: View) -> list[tuple[Sequence, str]]:
        return [(s, self._reason(s, view)) for s in self._plan(view)] if self._new else []

    def _reason(self, sequence: Sequence, view: View) -> str:
        left = (self._due(sequence) or 0.0) - view.now
        when = f"is due in {left:.3f} s" if left > 0 else f"was due {-left:.3f} s ago"
        return (
            f"its first token {when}, and beside the {len(self._let_in)} requests that were let in before, its "
            f"prompt of {sequence.num_prompt} tokens cannot be computed by then"
        )

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        if self._due(sequence) is not None:
            self._new.append(sequence)

    def on_step(self, done: StepDone, view: View) -> None:
        if done.num_prefill_tokens:
            self._step_s += 0.1 * (done.ended - done.started - self._step_s)
            self._pace.on_step(done, view)
