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
    integers = np.array(
        [
            (
                s.slot,
                s.known.size,
                s.known.size - s.num_prompt,
                s.num_cached_tokens,
                blocks.size,
                s.submit.sample_index,
                s.submit.top_k,
                s.submit.min_tokens,
                s.submit.adapter_id,
                len(ids),
            )
            for (s, blocks), ids in zip(new, stop_ids, strict=True)
        ],
        np.int32,
    ).T.copy()  # so that every column is contiguous
    numbers = np.array([(s.temperature, s.top_p, s.min_p) for s in submits], np.float32).T.copy()
    names = ("slots", "num_tokens", "num_outputs", "num_computed", "num_blocks", "sample_index", "top_k", "min_tokens")
    columns = {f"new_{name}": integers[i] for i, name in enumerate((*names, "adapter_id", "num_stop_ids"))}
    return columns | {
        "new_tokens": np.concatenate([s.known for s, _ in new]),
        "new_blocks": np.concatenate([blocks for _, blocks in new]),
        "new_seeds": np.array([s.seed for s in submits], np.uint64).view(np.int64),
        "new_temperature": numbers[0],
        "new_top_p": numbers[1],
        "new_min_p": numbers[2],
        "new_stop_ids": np.array([i for ids in stop_ids for i in ids], np.int32),
        "new_is_pooling": np.array([s.pooling is not None for s in submits], np.uint8),
    }
