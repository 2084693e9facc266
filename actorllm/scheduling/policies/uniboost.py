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
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.scheduling.policy import KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence

MOST = 1 - 1e-12
"""A fraction for which there is a boost still."""
NEVER = -math.inf
NEAR = 1e-3
"""Of 1 / gamma: the last bits of a fraction up to MOST are worth less."""


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
        self._rests: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        """The lengths of `_sorted`, and by place there the mean of it and of all longer ones; None: to be made anew."""
        self._arrivals: NDArray[np.float64] = np.zeros(0)
        """By slot, of the latest request that was admitted to it; NEVER: it gives way to none any more. Empty: none has run."""

    def rest(self, num_output: int) -> float:
        """Tokens that a request is expected to put out still, of which so many are there."""
        if not self._sorted:
            return max(1.0, self.unknown_output - num_output)
        _, means = self._means()
        place = bisect_right(self._sorted, num_output)
        if place == len(self._sorted):  # longer than any: as much again
            return float(max(1, num_output))
        return max(1.0, means.item(place) - num_output)

    def _means(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """See `_rests`."""
        if self._rests is None:
            lengths = np.array(self._sorted, float)
            self._rests = lengths, (np.cumsum(lengths[::-1]) / np.arange(1, lengths.size + 1))[::-1]
        return self._rests

    def boost(self, num_tokens: float) -> float:
        """Seconds, of work of so many tokens."""
        fraction = math.exp(-self.gamma * num_tokens / self._tokens_per_s)
        return -math.log1p(-min(fraction, MOST)) / self.gamma

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
        if self._is_room_ahead(sequence, view):
            return False
        lost = view.batch.num_computed.item(victim.slot) if victim.slot >= 0 else 0
        return self._place(sequence, view) + lost / self._tokens_per_s < self._place(victim, view)

    def giving_way(self, sequence: Sequence, view: View) -> list[Sequence]:
        """Only those near to it are asked one by one: what numpy computes may differ from `math` in the last bits."""
        if not self._arrivals.size or self._is_room_ahead(sequence, view):
            return []
        batch = view.batch
        rests = self._rests_of(batch.num_known - batch.num_prompt)
        fractions = np.exp(-self.gamma / self._tokens_per_s * (batch.num_known - batch.num_computed + rests))
        places = self._arrivals + np.log1p(-np.minimum(fractions, MOST)) / self.gamma
        mine = self._place(sequence, view) + batch.num_computed / self._tokens_per_s
        near = batch.sequences[np.flatnonzero(mine < places + NEAR / self.gamma)].tolist()
        return [one for one in near if one is not None and self.preempt_for(sequence, one, view)]

    def _rests_of(self, num_outputs: I32) -> NDArray[np.float64]:
        """As `rest`, of many."""
        if not self._sorted:
            unknown: NDArray[np.float64] = np.maximum(1.0, self.unknown_output - num_outputs)
            return unknown
        lengths, means = self._means()
        places = np.searchsorted(lengths, num_outputs, "right")
        expected = means[np.minimum(places, lengths.size - 1)] - num_outputs
        rests: NDArray[np.float64] = np.maximum(1.0, np.where(places < lengths.size, expected, num_outputs))
        return rests

    @staticmethod
    def _is_room_ahead(sequence: Sequence, view: View) -> bool:
        """The step is full, and the next one will have room."""
        return view.batch.num_free_slots > 0 and view.kv.num_free >= view.admission_blocks(sequence)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        if not self._arrivals.size:
            self._arrivals = np.zeros(view.batch.num_slots)
        is_open = sequence.num_preemptions < self.max_preemptions
        self._arrivals[sequence.slot] = sequence.arrival if is_open else NEVER
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
