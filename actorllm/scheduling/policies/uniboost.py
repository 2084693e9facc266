"""UniBoost ("Beyond Prediction: Tail-Aware Scheduling for LLM Inference", ICML 2026, arXiv 2606.18431): soft boosts for the
tail.

The paper: "our method reduces P99 TTLT by up to 35-50% relative to SRPT with perfect length knowledge". A request is served
as if it had come earlier by a boost, which is the greater the less work it is. With work s the boost is log(1 / (1 -
exp(-gamma * s))) / gamma (gamma-boost, Yu and Scully, SIGMETRICS 2024). As gamma falls to 0 the order is shortest first; as
it grows, first come, first served. In between, no request waits for one that came later by more than the boost of the least
work.

No length is predicted. Work is what is left of the prompt, and the mean rest of recent answers. Counted are those that were
longer than what the request has put out. In heavy tails that rest grows with the output, so long answers lose their boost. A
waiting request displaces a running one for memory or a slot. It must still come first when the lost computation counts
against it.

The code of the authors was not there to read. The rule for displacing and the estimate of work are this module's own.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque

import numpy as np

from actorllm.scheduling.policy import KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence


class UniBoost(KeyPolicy):
    """gamma is per second of work of the whole machine."""

    name = "uniboost"
    ignores_decode_steps = True  # they tell nothing of the rate of prompts
    keys_grow = True  # that is, they stay as they are
    gamma = 0.05
    window = 512
    """So many answers are remembered."""
    unknown_output = 200.0
    """Tokens of an answer, before any has ended."""
    max_preemptions = 1
    """How often a request is displaced by others at most."""

    def __init__(self) -> None:
        self._tokens_per_s = 8500.0
        self._recent: deque[int] = deque(maxlen=self.window)
        self._sorted: list[int] = []
        self._rests: list[float] | None = None
        """By place in `_sorted`: the mean of it and of all longer ones; None: to be made anew."""

    def rest(self, num_output: int) -> float:
        """Tokens that a request is expected to put out still, of which so many are there."""
        if not self._sorted:
            return max(1.0, self.unknown_output - num_output)
        if self._rests is None:
            lengths = np.array(self._sorted[::-1], float)
            self._rests = (np.cumsum(lengths) / np.arange(1, lengths.size + 1))[::-1].tolist()
        place = bisect_right(self._sorted, num_output)
        if place == len(self._sorted):  # longer than any: as much again
            return float(max(1, num_output))
        return max(1.0, self._rests[place] - num_output)

    def boost(self, num_tokens: float) -> float:
        """Seconds, of work of so many tokens."""
        fraction = math.exp(-self.gamma * num_tokens / self._tokens_per_s)
        return -math.log1p(-min(fraction, 1 - 1e-12)) / self.gamma

    def key(self, sequence: Sequence, view: View) -> SortKey:
        place = sequence.policy_state.get("boosted")
        if not isinstance(place, tuple) or place[0] != sequence.num_preemptions:
            num_output = sequence.known.size - sequence.num_prompt
            tokens = view.remaining(sequence) + self.rest(num_output)
            place = sequence.num_preemptions, sequence.arrival - self.boost(tokens)
            sequence.policy_state["boosted"] = place
        return (place[1],)

    def key_horizon(self, sequence: Sequence, view: View) -> float:
        return view.now  # whether a running one gives way to it changes with every token of that

    def _place(self, sequence: Sequence, view: View) -> float:
        """In the order, by what is left of it now."""
        if sequence.slot < 0:
            return float(self.key(sequence, view)[0])
        num_output = view.batch.num_known.item(sequence.slot) - sequence.num_prompt
        return sequence.arrival - self.boost(view.remaining(sequence) + self.rest(num_output))

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        return (self._place(sequence, view), sequence.arrival_index)

    def preempt_for(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        if victim.num_preemptions >= self.max_preemptions:
            return False
        if view.batch.num_free_slots > 0 and view.kv.num_free >= view.admission_blocks(sequence):
            return False  # the step is full, and the next one will have room
        lost = view.batch.num_computed.item(victim.slot) if victim.slot >= 0 else 0
        return self._place(sequence, view) + lost / self._tokens_per_s < self._place(victim, view)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        sequence.policy_state["boosted slot"] = sequence.slot

    def on_preempt(self, sequence: Sequence, view: View) -> None:
        sequence.policy_state.pop("boosted slot", None)

    def on_end(self, sequence: Sequence, view: View) -> None:
        slot = sequence.policy_state.pop("boosted slot", None)
        if not isinstance(slot, int) or sequence.finish_reason in ("abort", "error"):
            return
        length = view.batch.num_known.item(slot) - sequence.num_prompt
        if len(self._recent) == self.window:
            self._sorted.remove(self._recent[0])
        self._recent.append(length)
        insort(self._sorted, length)
        self._rests = None

    def on_step(self, done: StepDone, view: View) -> None:
        took = done.ended - done.started
        if done.num_prefill_tokens and took > 0:
            rate = (done.num_prefill_tokens + done.slots.size) / took
            self._tokens_per_s += 0.02 * (rate - self._tokens_per_s)
