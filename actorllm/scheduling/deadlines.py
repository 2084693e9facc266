"""`Deadlines`: when the next token of every running request is due, by column; and when waiting ones are.

For policies that size their steps by what the tightest stream can stand. Owned by a policy, which forwards `on_admit` and
`on_step`. Token i of a request is due at its anchor + i * tpot. With "slo" the anchor is when the first token was due, or when
it came if that was later. So a steady reader has a buffer after an early start (QoServe). With "first" the anchor is always when
the first token came, so that every pause counts. Without a promise per token nothing is ever due.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.policy import StepDone, View
from actorllm.scheduling.sequence import Sequence

Anchor = Literal["slo", "first"]


def first_due(sequence: Sequence) -> float:
    """When the first token of a request is due, or its end if only that is promised; infinity without a promise.

    With a promise per token alone it is the arrival: every later token is late by what the first one waits.
    """
    submit = sequence.submit
    if submit.slo is None:
        return math.inf
    ttft, tpot, e2e, per_prompt_token = submit.slo
    if ttft is not None:
        return submit.arrival + ttft + (per_prompt_token or 0.0) * submit.prompt.size
    if e2e is not None:
        return submit.arrival + e2e
    return submit.arrival if tpot is not None else math.inf


def last_due(sequence: Sequence) -> float:
    """From when on a request that waits has missed what it was promised; infinity: it cannot miss it by waiting.

    Without a token that is the deadline of the first one, or of the end where only that is promised. With one it is that of
    the end: a pause after the first token makes no promise impossible. Neither does a promise per token alone.
    """
    submit = sequence.submit
    if submit.slo is None:
        return math.inf
    ttft, _, e2e, _ = submit.slo
    if ttft is not None and sequence.first_token is None and sequence.known.size == sequence.num_prompt:
        return first_due(sequence)
    return math.inf if e2e is None else submit.arrival + e2e


class Deadlines:
    """See the module docstring."""

    def __init__(self, anchor: Anchor = "slo") -> None:
        self._anchor: Anchor = anchor
        self._start: NDArray[np.float64] = np.zeros(0)
        self._pace: NDArray[np.float64] = np.zeros(0)
        """Seconds per token; infinity: nothing promised."""

    def on_admit(self, sequence: Sequence, view: View) -> None:
        if not self._start.size:
            self._start, self._pace = np.full((2, view.limits.max_seqs), math.inf)
        slo = sequence.slo
        self._pace[sequence.slot] = math.inf if slo is None or slo.tpot is None else slo.tpot
        has_ttft = slo is not None and slo.ttft is not None
        self._start[sequence.slot] = first_due(sequence) if has_ttft else math.inf
        if sequence.first_token is not None:
            self._starts(sequence.slot, sequence.first_token)

    def _starts(self, slot: int, came: float) -> None:
        due = float(self._start[slot])
        self._start[slot] = came if self._anchor == "first" or due == math.inf else max(due, came)

    def on_step(self, done: StepDone, view: View) -> None:
        """Those whose first token came with this step."""
        batch = view.batch
        if done.num_prefill_tokens:
            slots = done.slots
            for slot in slots[batch.num_known[slots] == batch.num_prompt[slots] + 1].tolist():
                self._starts(slot, done.ended)

    def next_due(self, view: View, ahead: int = 0) -> NDArray[np.float64]:
        """For each of `view.decode_slots`, when the token that its next step samples is due; infinity: never.

        ahead: the token so many steps later.
        """
        slots, batch = view.decode_slots, view.batch
        start, pace = self._start[slots], self._pace[slots]
        due = np.full(slots.size, math.inf)
        is_due = np.isfinite(start) & np.isfinite(pace)
        index = batch.num_computed[slots] + (1 + ahead) - batch.num_prompt[slots]
        due[is_due] = start[is_due] + pace[is_due] * index[is_due]
        return due
