"""`glance`: the requests of a scheduler as the live page shows them now. Pure; costs nothing unasked."""

from __future__ import annotations

import heapq
from typing import Any

from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Sequence


def glance(scheduler: Scheduler, now: float, at_most: int) -> dict[str, list[dict[str, Any]]]:
    """Running and waiting requests, those that came first, at most so many of each. Times are seconds."""
    batch = scheduler.batch
    running = [sequence for sequence in batch.sequences if sequence is not None]
    waiting = [sequence for sequence in scheduler.alive() if sequence.slot < 0]

    def row(sequence: Sequence) -> dict[str, Any]:
        submit, slot = sequence.submit, sequence.slot
        num_known = int(batch.num_known[slot]) if slot >= 0 else sequence.known.size
        first = sequence.first_token
        return {
            "id": f"{sequence.key[0]}.{sequence.key[1]}",
            "state": sequence.state.value,
            "age_s": now - submit.arrival,
            "ttft_s": None if first is None else first - submit.arrival,
            "num_prompt": sequence.num_prompt,
            "num_output": max(0, num_known - sequence.num_prompt),
            "max_tokens": submit.max_tokens,
            "slo": submit.slo,
            "is_latency_sensitive": submit.is_latency_sensitive,
            "tenant": submit.tenant,
            "num_preemptions": sequence.num_preemptions,
        }

    def oldest(sequences: list[Sequence]) -> list[dict[str, Any]]:
        chosen = heapq.nsmallest(at_most, sequences, key=lambda sequence: sequence.arrival_index)
        return [row(sequence) for sequence in chosen]

    return {"running": oldest(running), "waiting": oldest(waiting)}
