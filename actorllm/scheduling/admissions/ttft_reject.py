"""Reject requests that cannot have their first token in time (the TTFT guard of SCORPIO, arXiv 2505.23022).

In an overload some requests miss their deadline; computing prompts that are late already makes others late, too. A waiting
request is rejected when its prompt alone, begun at once, would end after its deadline. The estimate is what steps took lately,
times `safety`. The rejected request may be tried elsewhere while that makes sense. Requests that promise no time to their first
token stay. So do requests that a scheduler which died had taken: the load is not what made them late.
"""

from __future__ import annotations

import heapq

from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.policy import Admit, StepDone, View
from actorllm.scheduling.sequence import Sequence, State
from actorllm.scheduling.step_time import Pace, Predicts
from actorllm.scheduling.waiting_order import NUM_STALE


class TtftReject(AdmissionPolicy):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "ttft-reject"
    safety = 1.2

    def __init__(self, step_time: Predicts | None = None) -> None:
        self._pace = Pace(step_time, self.safety)
        self._heap: list[tuple[float, int, Sequence]] = []
        """Waiting requests by their last chance to start, as it was when they were last looked at."""
        self._num_ended = 0
        """Since those that wait no more were cleaned out: the last chance of a request may be years away."""

    def _due(self, sequence: Sequence) -> float | None:
        """When the first token is due, of a request that promises it and may still be turned away."""
        slo = sequence.slo
        if slo is None or slo.ttft is None or sequence.is_taken:
            return None
        return sequence.arrival + slo.ttft + slo.ttft_per_prompt_token * sequence.num_prompt

    def _needs(self, sequence: Sequence, view: View) -> float:
        """Seconds until its first token, if it were next and had all that the decode leaves of each step."""
        remaining, d = view.remaining(sequence), view.decode_slots.size
        context = int(view.batch.num_computed[view.decode_slots].sum())
        room = max(1, view.limits.max_tokens - d)
        seconds, done = 0.0, 0
        while done < remaining:
            size = min(room, remaining - done)
            seconds += self._pace.step_time.seconds(size, d, context, done, size * (done + size / 2))
            done += size
        return self.safety * seconds

    def admit(self, sequence: Sequence, joining: list[Sequence], leaving: list[Sequence], view: View) -> Admit:
        due = self._due(sequence)
        if due is None or view.now + self._needs(sequence, view) <= due:
            return Admit.ADMIT
        heapq.heappush(self._heap, (view.now, sequence.arrival_index, sequence))
        return Admit.SKIP  # it is rejected with the next step

    def reject(self, view: View) -> list[tuple[Sequence, str]]:
        rejected: dict[Sequence, str] = {}
        later: dict[Sequence, float] = {}
        while self._heap and self._heap[0][0] <= view.now:
            _, _, sequence = heapq.heappop(self._heap)
            due = self._due(sequence)
            # It has an entry from its arrival, and another one if its turn came too late (`admit`).
            if due is None or sequence.state is not State.WAITING or sequence in rejected or sequence in later:
                continue
            needs = self._needs(sequence, view)
            if view.now + needs <= due:
                later[sequence] = due - needs
            elif view.may_start(sequence):
                rejected[sequence] = self._reason(sequence, due, needs, view)
            else:  # held up by a pause, say, which is none of its fault
                later[sequence] = view.now
        for sequence, last_chance in later.items():
            self._push(sequence, last_chance)
        return list(rejected.items())

    def _reason(self, sequence: Sequence, due: float, needs: float, view: View) -> str:
        left = due - view.now
        when = f"is due in {left:.3f} s" if left > 0 else f"was due {-left:.3f} s ago"
        return (
            f"its first token {when}, and its prompt of {sequence.num_prompt} tokens alone takes {needs:.3f} s: after "
            f"{view.now - sequence.arrival:.3f} s in the queue it cannot keep its objective any more"
        )

    def _push(self, sequence: Sequence, last_chance: float) -> None:
        heapq.heappush(self._heap, (last_chance, sequence.arrival_index, sequence))

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        due = self._due(sequence)
        if due is not None:
            self._push(sequence, due - self._needs(sequence, view))

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._num_ended += 1
        if self._num_ended > NUM_STALE + len(self._heap) // 2:
            self._num_ended = 0
            self._heap = [entry for entry in self._heap if entry[-1].state is State.WAITING]
            heapq.heapify(self._heap)

    def on_step(self, done: StepDone, view: View) -> None:
        if done.num_prefill_tokens:
            self._pace.on_step(done, view)
