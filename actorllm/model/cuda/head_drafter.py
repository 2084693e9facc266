"""`DeviceHeadDrafter`: drafts of a head on a device, which is brought the states of the target.

What a head is given, and when, is as on the CPU (`cpu.draft_heads.drafter`). The states of every step of the target are copied
behind its launch, as steps may be launched ahead. Those of decode rows wait by slot. That of the last token of each block is kept
beside the block's keys. Which drafts are right is known later. So the states of all drafts are stored one
behind the other, and `observe` says how many of them count. The next step overwrites the others.

A state that is not finite is stored as zeros. The head never sees it, and the request fails by what the target samples.

Invariant: of a slot that can draft, `computed` tokens have their keys and values, some perhaps as zeros. `waiting` states wait,
which are those before all further known tokens. Another slot has `LOST`. Owned by the runner of the target.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.messages import I32, NO_I32, StepPlan
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.draft_model import DeviceDraftModel, DraftingRunner
from actorllm.model.cuda.head import DeviceHead
from actorllm.model.inputs import PersistentBatch, StepInputs
from actorllm.model.speculation.head_shape import HeadShape
from actorllm.model.speculation.histories import Histories
from actorllm.types.speculation import EAGLE, EAGLE3

I64 = NDArray[np.int64]

WAITING_TOKENS = 16
"""States of a row that wait, beside those of the longest step."""
LOST = -1


class HeadsRunner(DraftingRunner, Protocol):
    """The runner of a head, as it is seen here."""

    device: Device
    head_shape: HeadShape
    room: int
    """States of a slot that can wait."""
    states: torch.Tensor
    """[num_slots * room, state_size]: those that wait, by slot."""
    block_states: torch.Tensor
    """[num_blocks, state_size]: of the last token of each block."""

    @property
    def drafting_head(self) -> DeviceHead:
        """Its model."""

    def follow(self, slots: I32, firsts: I32, counts: I32, ids: I64, before: torch.Tensor) -> None:
        """Compute the keys and values of some consecutive tokens of each slot.

        Arguments:
            slots, firsts, counts: of each slot, where its tokens begin, and how many there are.
            ids: of all tokens, one slot behind the other.
            before: [num_tokens, state_size] of the target, before each of them.
        """

    def forget(self, slots: I32, firsts: I32, counts: I32) -> None:
        """Let the keys and values of some consecutive tokens of each slot be zeros."""


def consecutive(firsts: NDArray[np.integer], counts: I32) -> I64:
    """So many numbers from each first one on."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - counts, counts) + np.repeat(firsts, counts)


class DeviceHeadDrafter(DeviceDraftModel):
    """See the module docstring.

    Arguments:
        runner: of the head.
        is_greedy: as of `DeviceDraftModel`.
        most_rows: of a batch that drafts.
    """

    runner: HeadsRunner

    def __init__(self, runner: HeadsRunner, *, is_greedy: bool, most_rows: int) -> None:
        super().__init__(runner, is_greedy=is_greedy)
        self._most_rows = most_rows
        self._room, self._shape, self._device = runner.room, runner.head_shape, runner.device
        self._waiting: NDArray[np.int32] = np.zeros(0, np.int32)

    # Before a step of the target --------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Take over what a plan of the target says of requests and blocks."""
        self.runner.apply(self._plan_of(plan, prefill_slots=NO_I32, prefill_counts=NO_I32))
        batch = self.runner.batch
        missing = batch.num_slots - self.computed.size
        if missing > 0:
            none = np.zeros(missing, np.int32)
            self.computed, self._drafted, self._waiting = (
                np.concatenate((x, none)) for x in (self.computed, self._drafted, self._waiting)
            )
        if not plan.new_rows.size:
            return
        new = plan.new
        slots, computed = new["slot"].astype(np.int64), new["num_computed"].astype(np.int64)
        is_end = (computed > 0) & (computed % batch.block_size == 0)
        self.computed[slots] = computed
        self._waiting[slots] = np.where(computed == 0, 0, np.where(is_end, 1, LOST))
        if is_end.any():
            found, blocks = slots[is_end], computed[is_end] // batch.block_size - 1
            to, where = self._device.upload_parts(
                found * self._room, batch.block_tables[0, found, blocks].astype(np.int64)
            )
            self.runner.states.index_copy_(0, to, self.runner.block_states.index_select(0, where))

    def catch_up(self, batch: PersistentBatch, histories: Histories, unknown: I32) -> None:
        slots = batch.decode_slots
        if not len(slots) or len(slots) > self._most_rows:
            return
        slots = slots[self._waiting[slots] > WAITING_TOKENS]
        if not slots.size:
            return
        ahead = np.isin(slots, unknown).astype(np.int32)  # their newest tokens are not known here yet
        counts = self._waiting[slots] - 1 - ahead
        ids = []
        for slot, count, num_ahead in zip(slots.tolist(), counts.tolist(), ahead.tolist(), strict=True):
            history = histories.of(slot)
            assert history is not None
            lag = int(self._waiting[slot]) - num_ahead
            ids.append(np.maximum(history.tokens[history.tokens.size - lag :][:count], 0))
        self.runner.follow(
            slots, self.computed[slots], counts, np.concatenate(ids).astype(np.int64), self._taken(slots, counts)
        )
        self._drop(slots, counts)

    def _drop(self, slots: I32, counts: I32) -> None:
        """So many of the oldest states of these slots wait no more."""
        left = self._waiting[slots] - counts
        base = slots.astype(np.int64) * self._room
        to, where = self._device.upload_parts(consecutive(base, left), consecutive(base + counts, left))
        self.runner.states.index_copy_(0, to, self.runner.states.index_select(0, where))
        self.computed[slots] += counts
        self._waiting[slots] = left

    def _taken(self, slots: I32, counts: I32) -> torch.Tensor:
        """The oldest states that wait of each slot, so many, one slot behind the other."""
        where = consecutive(slots.astype(np.int64) * self._room, counts)
        return self.runner.states.index_select(0, self._device.upload(where))

    # Behind a step of the target --------------------------------------------------------------------------------------

    def states_of(self, states: torch.Tensor, tapped: torch.Tensor | None) -> torch.Tensor:
        """What the head reads of tokens of the target, [num_tokens, state_size].

        Arguments:
            states: behind its last layer.
            tapped: behind others (`DeviceDecoder.taps`).
        """
        if self._shape.method == EAGLE3:
            assert tapped is not None
            return tapped
        if self._shape.method != EAGLE and not (self._shape.mtp is not None and self._shape.mtp.reads_normed):
            return states
        target = self.runner.drafting_head.target
        assert target.norm is not None
        normed = torch.empty_like(states)
        ops.rmsnorm(states, target.norm, target.config.rms_norm_eps, normed)
        return normed

    @torch.inference_mode()
    def follow(self, inputs: StepInputs, seen: torch.Tensor) -> None:
        """The target has launched a step. seen: `states_of` its tokens."""
        is_finite = torch.isfinite(seen.sum(1, dtype=torch.float32)).unsqueeze(1)
        seen = torch.where(is_finite, seen, torch.zeros_like(seen))
        if inputs.prefill_slots:
            self._prefill(inputs, seen[inputs.num_decodes :])
        if inputs.forks:
            slots, sources = (np.array(column, np.int64) for column in zip(*inputs.forks, strict=True))
            self.computed[slots], self._waiting[slots] = self.computed[sources], self._waiting[sources]
            to, where = self._device.upload_parts(slots * self._room, sources * self._room)
            self.runner.states.index_copy_(0, to, self.runner.states.index_select(0, where))
        if len(inputs.decode_slots):
            self._decoded(inputs, seen)

    def _prefill(self, inputs: StepInputs, seen: torch.Tensor) -> None:
        """The prompts of a step, whose states these are."""
        room, size = self._room, self.runner.batch.block_size
        slots, firsts, counts = (
            np.array(column, np.int32) for column in (inputs.prefill_slots, inputs.prefill_first, inputs.prefill_counts)
        )
        starts = np.array(inputs.prefill_starts, np.int64) - inputs.num_decodes
        positions = consecutive(firsts, counts)
        rows = np.repeat(slots, counts)
        waiting, is_first = self._waiting[slots], firsts == 0
        is_known = is_first | ((waiting == 1) & (self.computed[slots] == firsts))
        # The state before each token: that of the token before, or what waits, or zeros.
        before = torch.zeros_like(seen)
        before[1:] = seen[:-1]
        at, where, ends, blocks, lasts, firsts_of_slots, kept = self._device.upload_parts(
            starts[waiting == 1],
            slots[waiting == 1].astype(np.int64) * room,
            (last := np.flatnonzero((positions + 1) % size == 0)),
            self.runner.batch.block_tables[0][rows[last], positions[last] // size].astype(np.int64),
            starts + counts - 1,
            slots.astype(np.int64) * room,
            np.flatnonzero(positions > 0),  # nothing is before the first token: the head begins with the second
        )
        before.index_fill_(0, self._device.upload(starts[waiting != 1]), 0)
        before.index_copy_(0, at, self.runner.states.index_select(0, where))
        self.runner.block_states.index_copy_(0, blocks, seen.index_select(0, ends))
        self.runner.states.index_copy_(0, firsts_of_slots, seen.index_select(0, lasts))
        self.computed[slots], self._waiting[slots] = firsts + counts, np.where(is_known, 1, LOST)
        here = counts - is_first > 0
        if here.any():
            ids = np.maximum(inputs.token_ids[inputs.num_decodes :], 0)[positions > 0].astype(np.int64)
            mine = (firsts + is_first)[here], (counts - is_first)[here]
            self.runner.follow(slots[here], *mine, ids, before.index_select(0, kept))

    def _decoded(self, inputs: StepInputs, seen: torch.Tensor) -> None:
        """Decode rows and their drafts: the states of all of them are stored, and those of the rows count."""
        slots = inputs.decode_slots
        num_rows = len(slots)
        rows, within, places = np.arange(num_rows), np.zeros(num_rows, np.int64), inputs.result_tokens[:num_rows]
        if inputs.drafts is not None:
            assert inputs.draft_tokens is not None
            counts = inputs.drafts.counts.astype(np.int64)
            of_drafts = np.repeat(rows, counts)
            behind = np.arange(len(of_drafts)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
            rows, within = np.concatenate((rows, of_drafts)), np.concatenate((within, behind))
            places = np.concatenate((places, inputs.draft_tokens))
        longest = np.bincount(rows, minlength=num_rows)
        is_full = (self._waiting[slots] != LOST) & (self._waiting[slots] + longest > self._room)
        if is_full.any():
            full = slots[is_full]
            counts_of_full = self._waiting[full] - 1
            self.runner.forget(full, self.computed[full], counts_of_full)
            self._drop(full, counts_of_full)
        self._store(slots[rows], self._waiting[slots][rows] + within, inputs.positions[places], seen, places)
        self._waiting[slots] += self._waiting[slots] != LOST

    @torch.inference_mode()
    def again(self, slots: I32, positions: I64, seen: torch.Tensor) -> None:
        """Rows of the step before were computed again, without drafts. seen: `states_of` their tokens, in their order."""
        self._store(slots, self._waiting[slots] - 1, positions, seen, np.arange(len(slots)))

    def _store(self, slots: I32, at: NDArray[np.integer], positions: I64, seen: torch.Tensor, places: I64) -> None:
        """States of some tokens, those that end a block beside it, too.

        Arguments:
            slots, positions: of each token.
            at: as the how-manieth state of its slot it waits.
            places: which row of `seen` it is.
        """
        size = self.runner.batch.block_size
        here = np.flatnonzero(self._waiting[slots] != LOST)
        ends = np.flatnonzero((positions + 1) % size == 0)
        blocks = self.runner.batch.block_tables[0][slots[ends], positions[ends] // size]
        to, where, to_blocks, of_blocks = self._device.upload_parts(
            slots[here].astype(np.int64) * self._room + at[here],
            places[here].astype(np.int64),
            blocks.astype(np.int64),
            places[ends].astype(np.int64),
        )
        if here.size:
            self.runner.states.index_copy_(0, to, seen.index_select(0, where))
        if ends.size:
            self.runner.block_states.index_copy_(0, to_blocks, seen.index_select(0, of_blocks))

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        """So many of the drafts' states are those before known tokens."""
        self._waiting[slots] += np.where(self._waiting[slots] == LOST, 0, num_accepted).astype(np.int32)

    # Drafts -----------------------------------------------------------------------------------------------------------

    def _counts(self, histories: Histories, slots: I32, lags: I32) -> I32:
        """All that wait: a row has few of them."""
        return np.maximum(self._waiting[slots], 0)

    def _feed(self, single: I32, several: I32, counts: I32) -> None:
        """Give the first pass of a draft its states. counts: of tokens of `several`."""
        model = self.runner.drafting_head
        slots = np.concatenate((single, several)).astype(np.int32)
        given = model.combined(self._taken(slots, np.concatenate((np.ones(len(single), np.int32), counts))))
        if several.size:
            ops.copy(given, model.fed[: len(given)])
        else:
            ops.keep_rows(given, self._device.upload(single.astype(np.int64) + 1), model.kept)
        self._waiting[slots] = 0
