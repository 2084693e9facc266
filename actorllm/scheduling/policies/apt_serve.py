"""Apt-Serve (Gao et al., SIGMOD 2025, arXiv 2504.07494): the longest wait for the memory that it takes comes first.

The paper: "Apt-Serve achieves up to 8.8x improvement in effective throughput compared to the state-of-the-art inference
serving systems". The value of a request is how long it has been pending: since it came, or since its last token. Requests
come in the order of value per KV block, the greedy order whose result is at least half of the best one. Those that have
missed their first deadline are worth nothing. A step has prompts if the waiting requests are worth more in sum than the
running ones.

What is here is the scheduling. The paper also has a cache of hidden states, which takes half of the memory. That is not
here, and a part of the 8.8 is due to it. A step with prompts keeps its decode rows, as everywhere in this engine.
"""

from __future__ import annotations

import heapq
import math

from actorllm.scheduling.deadlines import last_due
from actorllm.scheduling.policy import Budget, KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.waiting_order import NUM_STALE


class AptServe(KeyPolicy):
    """Values change all the time, so the order is made anew every `refresh_s`."""

    name = "apt-serve"
    ignores_decode_steps = True  # without a request that waits there is nothing to weigh
    refresh_s = 0.2

    def __init__(self) -> None:
        self._num = 0
        self._starts = 0.0
        """Their number, and the sum of the times since when: of the waiting requests that are worth something."""
        self._late: list[tuple[float, int, Sequence]] = []
        """Heap of the times at which they stop being so."""
        self._step_s = 0.02
        """Of the last steps without prompts: for so long a running request is pending in each."""

    @staticmethod
    def _since(sequence: Sequence, view: View) -> float:
        """From when on it is pending. A preempted request had its last token when it lost its slot, and so about now."""
        if not sequence.num_preemptions:  # one that a scheduler before this one had served came here when that died
            return sequence.queued if sequence.submit.output.size else sequence.arrival
        since = sequence.policy_state.get("pending since")
        if not isinstance(since, tuple) or since[0] != sequence.num_preemptions:
            since = sequence.policy_state["pending since"] = sequence.num_preemptions, view.now
        return float(since[1])

    def key(self, sequence: Sequence, view: View) -> SortKey:
        is_late = view.now >= last_due(sequence)
        blocks = view.admission_blocks(sequence) if sequence.slot < 0 else view.kv.num_blocks.item(sequence.slot)
        return (is_late, -(view.now - self._since(sequence, view)) / max(1, blocks), sequence.arrival)

    def key_horizon(self, sequence: Sequence, view: View) -> float:
        return view.now + self.refresh_s

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        return (view.kv.num_blocks.item(sequence.slot), sequence.arrival_index)

    def budget(self, view: View) -> Budget:
        while self._late and self._late[0][0] <= view.now:
            self._drop(heapq.heappop(self._late)[-1])
        waiting = self._num * view.now - self._starts
        waiting += sum(view.now - self._since(s, view) for s in view.prefilling)
        num_decode = view.decode_slots.size
        has_prompts = waiting >= num_decode * self._step_s
        return Budget(view.limits.max_tokens if has_prompts else num_decode, view.limits.prefill_chunk)

    def _take(self, sequence: Sequence, view: View) -> None:
        due = last_due(sequence)
        if view.now < due:
            since = sequence.policy_state["pending"] = self._since(sequence, view)
            self._num += 1
            self._starts += since
            if due < math.inf:
                heapq.heappush(self._late, (due, sequence.arrival_index, sequence))

    def _drop(self, sequence: Sequence) -> None:
        since = sequence.policy_state.pop("pending", None)
        if not isinstance(since, int | float):
            return
        self._num -= 1
        self._starts = self._starts - since if self._num else 0.0
        if len(self._late) > 2 * self._num + NUM_STALE:  # what a client may promise is years away
            self._late = [entry for entry in self._late if "pending" in entry[-1].policy_state]
            heapq.heapify(self._late)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        self._take(sequence, view)

    def on_preempt(self, sequence: Sequence, view: View) -> None:
        self._take(sequence, view)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self._drop(sequence)

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._drop(sequence)

    def on_step(self, done: StepDone, view: View) -> None:
        if not done.num_prefill_tokens:
            self._step_s += 0.05 * (done.ended - done.started - self._step_s)
