"""`HeadDrafter`: drafts of a head that reads states of the target (`speculative_config`, methods "eagle", "eagle3" and "mtp").

A token goes through the head with the target's state of the token before it. States of prompts go through at once. Those of
decoded tokens wait by slot until the row drafts next. A row that rests is brought forward before its room is used up. The
state of the last token of each block is kept beside the head's keys and values. So a request that finds a prefix in
the cache finds all that the head needs, and no block of a hit is computed again.

In a batch that is too large for drafts nothing is brought forward. When the room of a row is used up, its states but the newest are
dropped, and their tokens stay without keys and values. The row can draft again later, by a head that has not seen these.

Invariant: of a decode row that can draft, `computed` tokens are in the cache, some perhaps as zeros. The states before all further
known ones wait. Another row has `LOST`: the state before its next token is not there. Owned by the runner.
"""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.config import EngineConfig
from actorllm.errors import ModelError
from actorllm.messages import I32, StepPlan
from actorllm.model.cpu.attention import KVCache, zero_pages
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.cpu.draft_heads.ends import Ends, ends_of
from actorllm.model.cpu.draft_heads.head import DraftHead
from actorllm.model.cpu.draft_passes import I64, DraftingModel, decode_inputs, newest_of
from actorllm.model.cpu.latent import LatentCache
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.inputs import PersistentBatch, StepInputs
from actorllm.model.quantization import open_weights
from actorllm.model.speculation.head_shape import HeadShape
from actorllm.model.speculation.histories import Histories
from actorllm.types.weight_version import FIRST_WEIGHTS, WeightSource

WAITING_TOKENS = 16
"""States of a row that wait, beside those of the longest step."""
LOST = -1


class HeadDrafter(DraftingModel):
    """See the module docstring.

    Arguments:
        config: of the engine.
        shape: of the head.
        target: its shape.
        dtype: of the target, which the head is computed in, too.
    """

    def __init__(self, config: EngineConfig, shape: HeadShape, target: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__(config, target.vocab_size)
        assert config.speculation is not None
        self._shape, self._dtype = shape, dtype
        self._longest_run = 1 + config.speculation.num_speculative_tokens
        self._room = WAITING_TOKENS + self._longest_run
        ranges = config.speculation.num_speculative_tokens_per_batch_size
        self._most_rows = max((last for _, last, drafts in ranges if drafts), default=0)
        self._head: DraftHead
        self._waiting: NDArray[np.int32] = np.zeros(0, np.int32)
        """By slot, how many states wait; `LOST`: one is missing."""
        self._states = torch.empty(0)  # [num_slots, room, state_size]
        self._block_states = torch.empty(0)  # [num_blocks, state_size], of the last token of each block
        self._pages: mmap.mmap
        """That `_block_states` are in."""

    # Before the first step --------------------------------------------------------------------------------------------

    def load(self, target: Decoder, show_progress: bool | None) -> None:
        ends = ends_of(target, self._config.model, show_progress)
        self.take_target(target, (self._read(ends, self._shape.model.weights, show_progress), ends))

    def stage(self, target: Decoder, source: WeightSource) -> tuple[DraftHead | None, Ends]:
        ends = ends_of(target, replace(self._config.model, weights=source), False)
        return None if self._shape.mtp is None else self._read(ends, source, False), ends

    def take_target(self, target: Decoder, staged: tuple[DraftHead | None, Ends]) -> None:
        head, ends = staged
        if head is not None:
            self._head = head
        self._head.target = ends
        target.taps = frozenset(self._shape.taps)

    def drop_target(self) -> None:
        del self._head.target

    def _read(self, target: Ends, source: WeightSource, show_progress: bool | None) -> DraftHead:
        """The head of a version of the weights. Trainers leave layers for further tokens out: these stay what they were first."""
        shape = self._shape
        try:
            with open_weights(replace(shape.model, weights=source), self._dtype, show_progress) as weights:
                if (
                    source.is_first
                    or shape.mtp is None
                    or weights.stored(f"{shape.mtp.prefix}{shape.mtp.hidden_norm}.weight")
                ):
                    return DraftHead(shape, weights, target, self._config.model.max_model_len)
            with open_weights(replace(shape.model, weights=FIRST_WEIGHTS), self._dtype, show_progress) as weights:
                return DraftHead(shape, weights, target, self._config.model.max_model_len)
        except ModelError as error:
            raise type(error)(f"speculative_config: the head that drafts: {error}") from error

    @property
    def block_bytes(self) -> int:
        c, size = self._shape.layers, self._config.cache.block_size
        per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim if c.latent is None else c.latent.width
        return (per_token * size + self._shape.state_size) * self._dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        most = self._config.scheduler.max_num_seqs
        return most * self._room * self._shape.state_size * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        c, size = self._shape.layers, self._shape.state_size
        block_size = self._config.cache.block_size
        if c.latent is not None:
            self.cache = LatentCache(c.num_layers, c.latent, num_blocks, block_size, self._dtype)
        else:
            self.cache = KVCache(c.num_layers, c.num_kv_heads, c.head_dim, num_blocks, block_size, self._dtype)
        self.cache.first_position = 1
        self._pages = zero_pages(num_blocks * size * self._dtype.itemsize)
        self._block_states = torch.frombuffer(self._pages, dtype=torch.uint8).view(self._dtype).view(-1, size)
        self.computed = self._waiting = np.zeros(0, np.int32)
        self._states = torch.empty(0, self._room, size, dtype=self._dtype)

    def zero(self, block_ids: I32) -> None:
        super().zero(block_ids)
        self._block_states[torch.from_numpy(block_ids.astype(np.int64))] = 0

    def copy(self, sources: I32, targets: I32) -> None:
        super().copy(sources, targets)
        kept = self._block_states[torch.from_numpy(sources.astype(np.int64))]
        self._block_states[torch.from_numpy(targets.astype(np.int64))] = kept

    def release(self) -> None:
        super().release()
        self._pages.madvise(mmap.MADV_DONTNEED)

    # Steps ------------------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, batch: PersistentBatch) -> None:
        missing = batch.num_slots - self.computed.size
        if missing > 0:
            none = np.zeros(missing, np.int32)
            self.computed, self._waiting = (np.concatenate((x, none)) for x in (self.computed, self._waiting))
            grown = torch.empty(batch.num_slots, *self._states.shape[1:], dtype=self._dtype)
            grown[: len(self._states)] = self._states
            self._states = grown
        if not plan.new_rows.size:
            return
        for slot, computed in plan.new[["slot", "num_computed"]].tolist():
            self.computed[slot], self._waiting[slot] = computed, 0
            if computed:
                block, offset = divmod(computed - 1, batch.block_size)
                is_last = offset == batch.block_size - 1
                self._waiting[slot] = 1 if is_last else LOST
                if is_last:
                    self._states[slot, 0] = self._block_states[int(batch.block_tables[0, slot, block])]

    def follow(self, inputs: StepInputs, states: torch.Tensor) -> torch.Tensor | None:
        seen = self._head.states_of_target(states)
        if inputs.prefill_slots:
            self._prefill(inputs, seen[inputs.num_decodes :])
        for slot, source in inputs.forks:
            self.computed[slot], self._waiting[slot] = self.computed[source], self._waiting[source]
            self._states[slot] = self._states[source]
        return seen[: inputs.num_decodes] if len(inputs.decode_slots) else None

    def _prefill(self, inputs: StepInputs, seen: torch.Tensor) -> None:
        """The prompts of a step. seen: the states of their tokens."""
        first, size = inputs.num_decodes, self.cache.block_size
        is_bad = ~torch.isfinite(seen.sum(1, dtype=torch.float32))
        if is_bad.any():  # such requests fail
            seen = seen.masked_fill(is_bad.unsqueeze(1), 0)
        before = torch.zeros_like(seen)
        before[1:] = seen[:-1]
        kv_slots = inputs.kv_slots[first:].copy()
        starts, counts, firsts, slots, tables = [], [], [], [], []
        columns = zip(
            inputs.prefill_slots,
            inputs.prefill_starts,
            inputs.prefill_counts,
            inputs.prefill_first,
            inputs.prefill_tables,
            strict=True,
        )
        for slot, start, count, position, table in columns:
            start -= first
            before[start] = self._states[slot, 0] if self._waiting[slot] == 1 else 0
            is_known = position == 0 or (self._waiting[slot] == 1 and self.computed[slot] == position)
            ends = np.arange(position, position + count)
            ends = ends[(ends + 1) % size == 0]
            if ends.size:
                blocks = torch.from_numpy(table[ends // size].astype(np.int64))
                self._block_states[blocks] = seen[torch.from_numpy(ends - position + start)]
            self.computed[slot], self._waiting[slot] = position + count, 1 if is_known else LOST
            self._states[slot, 0] = seen[start + count - 1]
            if position == 0:  # nothing is before it: the head begins with the second token
                kv_slots[start] = self.cache.padding_block * size
                start, count, position = start + 1, count - 1, 1
            if count:
                slots.append(slot)
                starts.append(start)
                counts.append(count)
                firsts.append(position)
                tables.append(table)
        step = replace(
            inputs,
            token_ids=inputs.token_ids[first:],
            positions=inputs.positions[first:],
            kv_slots=kv_slots,
            num_decodes=0,
            prefill_slots=slots,
            prefill_starts=starts,
            prefill_counts=counts,
            prefill_first=firsts,
            prefill_tables=tables,
            embedded=None,
            adapter_ids=None,
        )
        self._finite(step, self._head.forward(step, self.cache, self._head.combined(before))[0])

    def keep(self, batch: PersistentBatch, inputs: StepInputs, seen: torch.Tensor, runs: I32) -> None:
        slots, size = inputs.decode_slots, batch.block_size
        num_rows = len(slots)
        counts = runs[:num_rows].astype(np.int64) if runs.size else np.ones(num_rows, np.int64)
        # The tokens of each row: that of the row itself, and the drafts that were right.
        row_of = np.repeat(np.arange(num_rows), counts)
        within = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = inputs.result_tokens[:num_rows][row_of]
        if inputs.drafts is not None:
            assert inputs.draft_tokens is not None
            drafted = inputs.drafts.counts.astype(np.int64)
            where = np.flatnonzero(within)
            places[where] = inputs.draft_tokens[(np.cumsum(drafted) - drafted)[row_of[where]] + within[where] - 1]
        states = seen.index_select(0, torch.from_numpy(places))
        positions, here = inputs.positions[places], slots[row_of]
        is_good = np.isfinite(states.sum(1, dtype=torch.float32).numpy())
        ends = np.flatnonzero(((positions + 1) % size == 0) & is_good)
        if ends.size:
            blocks = batch.block_tables[0][here[ends], positions[ends] // size].astype(np.int64)
            self._block_states[torch.from_numpy(blocks)] = states[torch.from_numpy(ends)]
        is_full = (self._waiting[slots] != LOST) & (self._waiting[slots] + counts > self._room)
        if is_full.any():
            self._skip(batch, slots[is_full])
        waiting = self._waiting[slots]
        is_lost = waiting == LOST
        is_lost[row_of[~is_good]] = True
        self._waiting[slots] = np.where(is_lost, LOST, waiting + counts)
        stored = np.flatnonzero(~is_lost[row_of])
        if stored.size:
            where = (waiting[row_of] + within)[stored]
            self._states[torch.from_numpy(here[stored].astype(np.int64)), torch.from_numpy(where)] = states[
                torch.from_numpy(stored)
            ]

    def catch_up(self, batch: PersistentBatch, histories: Histories) -> None:
        slots = batch.decode_slots
        if not len(slots) or len(slots) > self._most_rows:
            return
        slots = slots[self._waiting[slots] > self._room - self._longest_run]
        if not slots.size:
            return
        # The newest token of each is left for the pass that drafts.
        counts = self._waiting[slots].astype(np.int64) - 1
        starts = self.computed[slots].astype(np.int64)
        tokens = np.concatenate(
            [newest_of(histories, slots[i : i + 1], counts[i : i + 1] + 1)[:-1] for i in range(len(slots))]
        )
        given = self._take(slots, counts)
        self._keep_newest(slots, counts)
        inputs, _ = decode_inputs(batch, slots, starts, counts, tokens, self._version)
        self._finite(inputs, self._head.forward(inputs, self.cache, self._padded(given, inputs))[0])

    def _skip(self, batch: PersistentBatch, slots: I32) -> None:
        """Go on from the newest states of these rows. What the head would have stored of the tokens before them is zeros."""
        counts = self._waiting[slots].astype(np.int64) - 1
        starts = self.computed[slots].astype(np.int64)
        num_tokens = int(counts.sum())
        self._keep_newest(slots, counts)
        inputs, _ = decode_inputs(batch, slots, starts, counts, np.zeros(num_tokens, np.int64), self._version)
        self.cache.clear(inputs, np.arange(num_tokens))

    def _keep_newest(self, slots: I32, counts: I64) -> None:
        """So many of the oldest states of these rows wait no more; one is left of each."""
        rows = torch.from_numpy(slots.astype(np.int64))
        self._states[rows, 0] = self._states[rows, torch.from_numpy(counts)]
        self.computed[slots] += counts.astype(np.int32)
        self._waiting[slots] = 1
        self._version += 1

    def _ready(self, batch: PersistentBatch, histories: Histories, slots: I32) -> NDArray[np.intp]:
        return np.flatnonzero(self._waiting[slots] > 0)

    def _begin(self, slots: I32, counts: I64) -> torch.Tensor:
        given = self._take(slots, counts)
        self._waiting[slots] = 0
        return given

    def _take(self, slots: I32, counts: I64) -> torch.Tensor:
        """The oldest states that wait of each slot, `combined`, one slot behind the other."""
        where = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = torch.from_numpy(np.repeat(slots, counts).astype(np.int64))
        return self._head.combined(self._states[rows, torch.from_numpy(where)])

    def _nothing_given(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, self._shape.layers.hidden_size, dtype=self._dtype)

    def _compute(
        self, inputs: StepInputs, last: I64, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        assert given is not None
        normed, states = self._head.forward(inputs, self.cache, self._padded(given, inputs))
        if not self._finite(inputs, normed):
            return None
        chosen = torch.from_numpy(last)
        return self._head.logits(normed[chosen]), states[chosen]

    @staticmethod
    def _padded(given: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """As many rows as the pass has tokens."""
        missing = len(inputs.token_ids) - len(given)
        return torch.cat((given, given.new_zeros(missing, given.shape[1]))) if missing else given
