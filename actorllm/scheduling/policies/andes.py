"""Andes (Liu et al., arXiv 2404.16283): serve those whose readers gain most from it, for the memory that they take.

The paper: "Andes improves the average QoE by up to 4.7x given the same GPU resource". A reader begins when the first token
is due, and reads on at the pace that was promised, as far as there are tokens. The quality of experience (QoE) falls with
what the reader is behind this. Looked at is the time `horizon_s` from now. The gain of a request is by how much less its
reader will be behind then if the request runs. It is a share of what should have been read. Requests come in the order
of gain per token of context. When memory or slots are out, one with more gain displaces one with less. That is above all
one whose reader has tokens to read for a while.

The order of the paper is that of its greedy packing; here the planner packs. Streams that are ahead keep their memory unless others
need it.
"""

from __future__ import annotations

from actorllm.scheduling.policy import KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_time import Pace, Predicts

UNPROMISED_TTFT_S = 1.0
UNPROMISED_PACE_S = 0.2
"""What readers expect of requests that promise nothing: about five tokens a second."""


class Andes(KeyPolicy):
    """step_time: a fitted model; None: what steps take is learned while they run."""

    name = "andes"
    ignores_decode_steps = True  # nothing of what it decides concerns them
    horizon_s = 5.0
    refresh_s = 0.25
    """How often the order of waiting requests is made anew."""
    margin = 1.2
    """How many times the gain of a running request a waiting one must have to displace it."""
    max_preemptions = 1

    def __init__(self, step_time: Predicts | None = None) -> None:
        self._pace = Pace(step_time, 1.0)
        self._tokens_per_s = 8500.0

    def density(self, sequence: Sequence, view: View) -> float:
        """Gain per token of context."""
        slo, prompt = sequence.slo, sequence.num_prompt
        ttft, tpot = UNPROMISED_TTFT_S, UNPROMISED_PACE_S
        if slo is not None:
            tpot = slo.tpot or tpot
            if slo.ttft is not None:
                ttft = slo.ttft + slo.ttft_per_prompt_token * prompt
        due, end = sequence.arrival + ttft, view.now + self.horizon_s
        wanted = max(0.0, (end - due) / tpot)
        if not wanted:
            return 0.0
        batch, d = view.batch, view.decode_slots.size
        known = batch.num_known.item(sequence.slot) if sequence.slot >= 0 else sequence.known.size
        there = known - prompt
        context = int(batch.num_computed[view.decode_slots].sum())
        step_s = self._pace.step_time.seconds(0, max(1, d), context)
        begins_in = view.remaining(sequence) / self._tokens_per_s if there == 0 or sequence.slot < 0 else 0.0
        more = max(0.0, self.horizon_s - begins_in) / max(step_s, 1e-4)
        # A reader never gets ahead of its own pace, and began with the first token.
        began = due if sequence.first_token is None else max(due, sequence.first_token)
        readable = max(0.0, (end - began) / tpot)
        behind_waiting = wanted - min(readable, there)
        behind_served = wanted - min(readable, there + more)
        return (behind_waiting - behind_served) / wanted / max(1, known)

    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (-self.density(sequence, view), sequence.arrival)

    def key_horizon(self, sequence: Sequence, view: View) -> float:
        return view.now + self.refresh_s

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        return (-self.density(sequence, view), sequence.arrival_index)

    def preempt_for(self, sequence: Sequence, victim: Sequence, view: View) -> bool:
        if victim.num_preemptions >= self.max_preemptions:
            return False
        if view.batch.num_free_slots > 0 and view.kv.num_free >= view.admission_blocks(sequence):
            return False  # the step is full, and the next one will have room
        return self.density(sequence, view) > self.margin * self.density(victim, view)

    def on_step(self, done: StepDone, view: View) -> None:
        took = done.ended - done.started
        if done.num_prefill_tokens and took > 0:
            self._tokens_per_s += 0.02 * (done.num_prefill_tokens / took - self._tokens_per_s)
        if done.num_prefill_tokens or self._pace.is_corrected:
            self._pace.on_step(done, view)
