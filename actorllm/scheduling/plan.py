"""`PlanBuilder`: collects the difference to the worker's persistent batch and turns it into the next `StepPlan`.

What is collected stays until a plan carries it: a slot freed while no step is due is dropped by the worker with the next
plan. The worker applies freed before new, so a slot may change hands within one plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actorllm.messages import I32, StepPlan
from actorllm.scheduling.batch import Rows
from actorllm.scheduling.sequence import Sequence


class PlanBuilder:
    """The next plan, as far as it is decided."""

    def __init__(self) -> None:
        self._freed: list[int] = []
        self._new: list[tuple[Sequence, I32]] = []
        self._sent_rows: I32 | None = None

    def free(self, slot: int) -> None:
        self._freed.append(slot)

    def add(self, sequence: Sequence, blocks: I32) -> None:
        self._new.append((sequence, blocks))

    def forget_worker(self) -> None:
        """The worker's batch is unknown (a step failed, a worker was replaced): send the next row set in full."""
        self._sent_rows = None

    def build(
        self,
        step: int,
        rows: Rows,
        extended: tuple[I32, I32],
        actions: tuple[I32, I32, I32],
        prefill: list[tuple[Sequence, int]],
        late_slots: I32,
    ) -> StepPlan:
        """The plan of a step; `extended` are slots and the one block that each got, `actions` as in KVCacheManager."""
        columns: dict[str, Any] = {}
        if self._freed:
            columns["freed"] = np.array(self._freed, np.int32)
            self._freed.clear()
        if self._new:
            columns.update(_new_columns(self._new))
            self._new.clear()
        slots, blocks = extended
        if slots.size:
            columns.update(extended_slots=slots, extended_blocks=blocks, extended_groups=np.zeros(slots.size, np.uint8))
        zero, sources, targets = actions
        if zero.size or sources.size:
            columns.update(zero_blocks=zero, copy_sources=sources, copy_targets=targets)
        if rows.slots is not self._sent_rows:
            self._sent_rows = columns["decode_slots"] = rows.slots
        if prefill:
            columns["prefill_slots"] = np.array([s.slot for s, _ in prefill], np.int32)
            columns["prefill_counts"] = np.array([n for _, n in prefill], np.int32)
        if late_slots.size:
            columns["late_slots"] = late_slots
        return StepPlan(step=step, **columns)


def _new_columns(new: list[tuple[Sequence, I32]]) -> dict[str, Any]:
    submits = [s.submit for s, _ in new]
    stop_ids = [sorted(s.stop_ids) if s.submit.min_tokens else [] for s, _ in new]
    return {
        "new_slots": np.array([s.slot for s, _ in new], np.int32),
        "new_num_tokens": np.array([s.known.size for s, _ in new], np.int32),
        "new_tokens": np.concatenate([s.known for s, _ in new]),
        "new_num_outputs": np.array([s.known.size - s.num_prompt for s, _ in new], np.int32),
        "new_num_computed": np.array([s.num_cached_tokens for s, _ in new], np.int32),
        "new_num_blocks": np.array([b.size for _, b in new], np.int32),
        "new_blocks": np.concatenate([b for _, b in new]),
        "new_seeds": np.array([s.seed for s in submits], np.uint64).view(np.int64),
        "new_sample_index": np.array([s.sample_index for s in submits], np.int32),
        "new_temperature": np.array([s.temperature for s in submits], np.float32),
        "new_top_p": np.array([s.top_p for s in submits], np.float32),
        "new_min_p": np.array([s.min_p for s in submits], np.float32),
        "new_top_k": np.array([s.top_k for s in submits], np.int32),
        "new_min_tokens": np.array([s.min_tokens for s in submits], np.int32),
        "new_num_stop_ids": np.array([len(i) for i in stop_ids], np.int32),
        "new_stop_ids": np.array([i for ids in stop_ids for i in ids], np.int32),
        "new_adapter_id": np.array([s.adapter_id for s in submits], np.int32),
        "new_is_pooling": np.array([s.pooling is not None for s in submits], np.uint8),
    }
