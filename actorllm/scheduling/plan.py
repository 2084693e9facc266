"""`PlanBuilder`: collects the difference to the worker's persistent batch and turns it into the next `StepPlan`.

What is collected stays until a plan carries it. A slot that is freed while no step is due is dropped by the worker with the
next plan. The worker applies freed before new, so a slot may change hands within one plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from actorllm.messages import I32, NO_I32, POOLING_CODES, SALT_ROW, U8, StepPlan, pack_rows
from actorllm.messages.logit_rules import encode_rules
from actorllm.scheduling.batch import Rows
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.snapshots import Save
from actorllm.types.logits_processors.travel import encode_rows


class PlanBuilder:
    """The next plan, as far as it is decided."""

    def __init__(self, eos_token_ids: frozenset[int] = frozenset(), tells_salts: bool = False) -> None:
        """tells_salts: the workers draft from outputs of other requests with the same cache salt."""
        self._eos_ids = eos_token_ids
        self._tells_salts = tells_salts
        self._freed: list[int] = []
        self._new: list[tuple[Sequence, int]] = []
        self._new_blocks: list[I32] = []
        self._sources: dict[Sequence, int] = {}
        self._sent_rows: dict[int, I32] = {}
        """By lane."""

    def free(self, slot: int) -> None:
        self._freed.append(slot)

    def add(self, new: list[tuple[Sequence, int]], blocks: I32) -> None:
        """These got a slot and so many blocks; `blocks` holds all of them, one sequence after the other."""
        self._new += new
        self._new_blocks.append(blocks)

    def fork(self, sequence: Sequence, num_blocks: int, blocks: I32, source: int) -> None:
        """As `add`, of one that shares the prompt which ends in this step in slot `source`."""
        self.add([(sequence, num_blocks)], blocks)
        self._sources[sequence] = source

    def forget_worker(self) -> None:
        """The worker's batch is unknown (a step failed, a worker was replaced): send the next row set in full."""
        self._sent_rows.clear()

    def build(
        self,
        step: int,
        rows: Rows,
        extended: tuple[I32, I32],
        actions: tuple[I32, I32, I32],
        prefill: list[tuple[Sequence, int]],
        late_slots: I32,
        max_drafts: int = 0,
        lane: I32 = NO_I32,
    ) -> StepPlan:
        """The plan of a step; `extended` are slots and the one block that each got, `actions` as in KVCacheManager.

        lane: `StepPlan.lane`.
        """
        # What has changed since the last plan: slots given up, requests that got one, blocks of those that go on.
        columns: dict[str, Any] = {}
        if self._freed:
            columns["freed"] = np.array(self._freed, np.int32)
            self._freed.clear()
        if self._new:
            columns |= _new_columns(self._new, self._eos_ids, self._sources)
            columns["new_blocks"] = _joined(self._new_blocks)
            if self._tells_salts and (salts := [(s.slot, digest_of(s)) for s, _ in self._new if s.submit.cache_salt]):
                columns["new_salts"] = np.array(salts, SALT_ROW).view(np.uint8)
            self._new.clear()
            self._new_blocks.clear()
            self._sources.clear()
        slots, blocks = extended
        if slots.size:
            columns["extended_slots"] = slots
            columns["extended_blocks"] = blocks
        zero, sources, targets = actions
        if zero.size or sources.size:
            columns.update(zero_blocks=zero, copy_sources=sources, copy_targets=targets)
        # The rows of the step; decode rows that the worker knows already are not named again.
        number = 0
        if lane.size:
            number, columns["lane"] = lane.item(0), lane
        if rows.slots is not self._sent_rows.get(number):
            self._sent_rows[number] = columns["decode_slots"] = rows.slots
        if prefill:
            columns["prefill_slots"] = np.array([s.slot for s, _ in prefill], np.int32)
            columns["prefill_counts"] = np.array([n for _, n in prefill], np.int32)
        if late_slots.size:
            columns["late_slots"] = late_slots
        if max_drafts:
            columns["max_drafts"] = max_drafts
        return StepPlan(step=step, **columns)


NO_PLAN = StepPlan(step=0)
"""Of a simulated scheduler."""


class NoPlanBuilder(PlanBuilder):
    """Of a simulated scheduler: no worker applies its plans, and nothing is collected for them."""

    def free(self, slot: int) -> None: ...

    def add(self, new: list[tuple[Sequence, int]], blocks: I32) -> None: ...

    def fork(self, sequence: Sequence, num_blocks: int, blocks: I32, source: int) -> None: ...

    def build(
        self,
        step: int,
        rows: Rows,
        extended: tuple[I32, I32],
        actions: tuple[I32, I32, I32],
        prefill: list[tuple[Sequence, int]],
        late_slots: I32,
        max_drafts: int = 0,
        lane: I32 = NO_I32,
    ) -> StepPlan:
        return NO_PLAN


def _new_columns(
    new: list[tuple[Sequence, int]], eos_ids: frozenset[int], sources: dict[Sequence, int]
) -> dict[str, Any]:
    rows: list[tuple[float, ...]] = []
    stop_ids: list[int] = []
    ruled: list[Sequence] = []
    processed: list[tuple[int, U8]] = []
    for sequence, _ in new:
        submit = sequence.submit
        num_tokens = sequence.known.size
        # No end of text before min_tokens, as in vLLM: also where it would not end the request.
        ids = sorted(sequence.stop_ids | eos_ids) if submit.min_tokens else ()
        stop_ids.extend(ids)
        if sequence.rules is not None and sequence.rules.is_for_worker:
            ruled.append(sequence)
        if submit.processor_params.size:
            processed.append((sequence.slot, submit.processor_params))
        rows.append(
            (  # a NewRow
                sequence.slot,
                num_tokens,
                submit.seed,
                num_tokens - submit.prompt.size,
                sequence.num_done,
                submit.sample_index,
                submit.temperature,
                submit.top_p,
                submit.min_p,
                submit.top_k,
                submit.min_tokens,
                len(ids),
                sequence.adapter_slot,
                POOLING_CODES[submit.pooling] | submit.pair_start << 8,
                sources.get(sequence, -1) if sources else -1,
            )
        )
    columns: dict[str, Any] = {
        "new_rows": pack_rows(rows),
        "new_tokens": _joined([s.known for s, _ in new]),
        "new_num_blocks": np.array([num_blocks for _, num_blocks in new], np.int32),
    }
    if stop_ids:
        columns["new_stop_ids"] = np.array(stop_ids, np.int32)
    if ruled:
        columns["new_rules"], columns["new_rule_numbers"] = encode_rules(
            (s.slot, s.num_prompt_logprobs + 1, s.rules) for s in ruled if s.rules is not None
        )
    if processed:
        columns["new_processed"] = encode_rows(processed)
    return columns


def with_states(plan: StepPlan, saves: tuple[Save, ...], restored: list[tuple[int, int]]) -> StepPlan:
    """The same plan, which keeps states of recurrent layers behind prefixes, or has slots go on from such.

    restored: slots with the places that they go on from.
    """
    if not saves and not restored:
        return plan
    saved = [(save.sequence.slot, save.position, save.place) for save in saves]
    return replace(
        plan,
        saved_states=np.array(saved, np.int32).reshape(-1) if saved else NO_I32,
        restored_states=np.array(restored, np.int32).reshape(-1) if restored else NO_I32,
    )


def digest_of(sequence: Sequence) -> bytes:
    """Of its cache salt, 16 bytes, none of which is 0: fields of bytes end before zeros."""
    salt = (sequence.submit.cache_salt or "").encode(errors="surrogatepass")
    return hashlib.blake2b(salt, digest_size=8).hexdigest().encode()


def _joined(parts: list[I32]) -> I32:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
