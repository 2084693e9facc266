"""What the device knows of the requests: columns by slot, changed by each plan's differences, advanced by the steps themselves.

A decode step names slots and reads everything else from here: the last token, how much is computed, the block table, how to
sample. It also advances the table, so that the next step can be launched before the host knows this one's tokens. The
host's `DeviceBatch` has the same columns but for the tokens. What it writes here is what a plan says. Of a slot that is in use
it writes only block tables (`extend`) and, for prompts, how much is computed.

`DeviceBatch` is the host's side of that: a `PersistentBatch` that is told at the launch of a step that tokens were sampled,
and later which. Both are owned by the runner.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.messages import I32, StepPlan
from actorllm.model.cuda.device import ALIGNMENT, Device
from actorllm.model.inputs import PersistentBatch
from actorllm_kernels.sample_pick import SamplingState
from actorllm_kernels.sample_topk_topp import FilterState

_INTEGERS = ("last_token", "num_computed", "sample_index", "num_outputs", "top_k", "adapter_id")
"""The first four are what steps change, and what tells their noise (`StateTable.settle`)."""
_FLOATS = ("temperature", "top_p", "min_p")
"""Columns of `inputs.Columns` that the device has too, in the order of the table's rows."""


class DeviceBatch(PersistentBatch):
    """See the module docstring."""

    owners: NDArray[np.int64] = np.zeros(0, np.int64)
    """By slot, a number that changes whenever the slot changes hands: results come when that may have happened."""

    def apply(self, plan: StepPlan) -> None:
        super().apply(plan)
        if plan.freed.size or plan.new_rows.size:
            if self.owners.size < self.num_slots:
                self.owners = np.concatenate((self.owners, np.zeros(self.num_slots - self.owners.size, np.int64)))
            self.owners[plan.freed[(plan.freed >= 0) & (plan.freed < self.num_slots)]] += 1
            if plan.new_rows.size:
                self.owners[plan.new["slot"]] += 1

    def expect(self, slots: I32) -> None:
        """A token of each of these rows is being sampled: the next plan may decode them."""
        columns = self.columns
        columns.num_outputs[slots] += 1
        columns.num_known[slots] = columns.num_computed[slots] + 1

    def learn(self, slots: I32, owners: NDArray[np.int64], tokens: I32) -> None:
        """Which tokens they were. owners: of the slots when `expect` was called; those that have changed are passed over."""
        if self.rules.has_memory and slots.size:
            mine = self.owners[slots] == owners
            self.rules.store(slots[mine], tokens[mine])

    def mark_bad(self, slots: I32, owners: NDArray[np.int64]) -> None:
        """The prompts of these had states that are not finite: what they sample is void."""
        self.bad_slots.update(slots[self.owners[slots] == owners].tolist())


class StateTable:
    """The columns on the device."""

    def __init__(self, device: Device, num_slots: int, max_blocks: int, num_draft_slots: int = 0) -> None:
        """num_slots: of requests. num_draft_slots: further ones behind these, for drafts (`add_drafts`)."""
        self.num_slots = num_slots
        num_slots += num_draft_slots
        self._device = device
        on = device.torch_device
        width = -(-num_slots // ALIGNMENT) * ALIGNMENT
        words = torch.zeros(len(_INTEGERS) + len(_FLOATS), width, dtype=torch.int32, device=on)
        self._words = words[:, :num_slots]
        self._seeds = torch.zeros(num_slots, dtype=torch.int64, device=on)
        self.block_table = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=on)
        column = dict(zip((*_INTEGERS, *_FLOATS), self._words.unbind(0), strict=True))
        temperature, top_p, min_p = (column[name].view(torch.float32) for name in _FLOATS)
        self.last_token, self.num_computed = column["last_token"], column["num_computed"]
        self.adapters = column["adapter_id"]
        """The slots of adapters (`adapters`); 0: none."""
        self.sampling = SamplingState(
            temperature, self._seeds, column["sample_index"], column["num_outputs"], self.last_token
        )
        self.filters = FilterState(column["top_k"], top_p, min_p)

    def add(self, batch: PersistentBatch, slots: I32) -> None:
        """Take over the rows of these slots, which are new."""
        if int(slots.max()) >= self.num_slots:
            raise ValueError(f"slot {int(slots.max())} is beyond the {self.num_slots} of max_num_seqs")
        self._put(batch, slots, slots, self._columns_of(batch, slots), self.block_table.shape[1])

    def add_drafts(self, batch: PersistentBatch, sources: I32, slots: I32, tokens: I32, ahead: I32) -> None:
        """Let these slots, which no request has, be what other slots are behind some of their drafts.

        sources: the slots whose drafts they are. tokens: the draft that each computes. ahead: how many drafts of the same source
        are computed up to it, this one included.
        """
        words = self._columns_of(batch, sources)
        words[_INTEGERS.index("last_token")] = tokens
        for name in ("num_computed", "num_outputs"):
            words[_INTEGERS.index(name)] += ahead
        longest = int(words[_INTEGERS.index("num_computed")].max())
        self._put(batch, sources, slots, words, longest // batch.block_size + 1)

    def _columns_of(self, batch: PersistentBatch, slots: I32) -> I32:
        """Copies of the columns that the table has, [num_columns, num_slots], by their bits."""
        columns = batch.columns
        words = [getattr(columns, name)[slots] for name in _INTEGERS]
        return np.stack(words + [getattr(columns, name)[slots].view(np.int32) for name in _FLOATS])

    def _put(self, batch: PersistentBatch, sources: I32, slots: I32, words: I32, width: int) -> None:
        """Write rows of the table. words: their columns; the rest is as of these other slots, with so many blocks."""
        seeds, tables = batch.columns.seeds[sources].view(np.int32), batch.block_tables[0, sources, :width]
        at, rows, seeds_there, tables_there = self._device.upload_parts(slots, words, seeds, tables)
        at = at.long()
        self._words.index_copy_(1, at, rows.view(len(words), -1))
        self._seeds.index_copy_(0, at, seeds_there.view(torch.int64))
        self.block_table[:, :width].index_copy_(0, at, tables_there.view(len(slots), -1))

    @torch.inference_mode()
    def settle(self, batch: PersistentBatch, slots: I32, last_tokens: I32) -> None:
        """Let these slots stand where the batch has them, whatever steps have made of them. last_tokens: what they go on from."""
        columns = batch.columns
        moved = (last_tokens, columns.num_computed[slots], columns.sample_index[slots], columns.num_outputs[slots])
        at, rows = self._device.upload_parts(slots, np.stack(moved))
        self._words[: len(moved)].index_copy_(1, at.long(), rows.view(len(moved), -1))

    def snapshot(self) -> torch.Tensor:
        """What steps change of it."""
        return self._words.clone()

    def restore(self, snapshot: torch.Tensor) -> None:
        self._words.copy_(snapshot)

    def extend(self, slots: I32, places: I32, blocks: I32) -> None:
        """Block `blocks[i]` becomes entry `places[i]` of the table of slot `slots[i]`."""
        flat = slots.astype(np.int64) * self.block_table.shape[1] + places
        at, values = self._device.upload_parts(flat.view(np.int32), blocks)
        self.block_table.view(-1).index_copy_(0, at.view(torch.int64), values)

    def compute(self, slots: I32, num_computed: I32) -> None:
        """How many tokens of these slots have their keys and values once the step is done."""
        at, values = self._device.upload_parts(slots, num_computed)
        self.num_computed.index_copy_(0, at.long(), values)
