"""What a worker knows of its requests: columns by slot, changed by each `StepPlan` and read by each step.

Invariants (`check_integrity`): a slot is live from the plan that lists it as new until the plan that frees it. A live slot has
num_computed < num_known and blocks for what is computed. Its known tokens are kept only while some of them wait for prefill. The
decode rows are live and distinct. In steady decode a step costs a fixed number of numpy calls, whatever
the number of rows. Called by the runner only; nothing here is torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32, NO_U8, U8, StepPlan, no_i32, no_u8
from actorllm.messages.embeds import GRID, LOWEST_ID, WHOLE
from actorllm.messages.logit_rules import decode_rules
from actorllm.model.grid_positions import grid_positions
from actorllm.model.logits import LogitRules

I64 = NDArray[np.int64]

SLOTS_AT_FIRST = 16

PADDING = -1
"""The slot of rows without effect: the last entry of every column, a request of one token in the padding block."""


def padded(num_rows: int) -> int:
    """The next number of rows that products are made for.

    Each new number costs oneDNN 0.3 ms and more for every matrix shape of the model, so only some are used: up to 8 all,
    then four per octave, and from 128 on multiples of 16 or 32 (where the arithmetic of a wasted row costs more).
    """
    if num_rows <= 8:
        return num_rows
    step = 1 << ((num_rows - 1).bit_length() - 3) if num_rows <= 128 else 16 if num_rows <= 512 else 32
    return -(-num_rows // step) * step


@dataclass(slots=True)
class StepInputs:
    """One step's tokens: decode rows (one token each, and their drafts), then the tokens of the prefill rows.

    Both parts may be padded, with rows of the padding slot or with tokens that are written to the padding block.
    """

    token_ids: I64  # [num_tokens]
    positions: I64  # [num_tokens]
    kv_slots: I64  # [num_tokens] block * block_size + offset
    num_decodes: int
    """Padding included."""
    decode_slots: I32
    """As in the plan: without padding, and not in the order of the tokens where that is sorted."""
    decode_lengths: I64  # [num_decodes] the new token included
    decode_positions: I64  # [num_decodes] of the new token
    decode_version: int
    """Changes whenever the decode rows are others, or may have been meanwhile."""
    decode_table: I32  # [num_decodes, max_blocks]
    is_sorted: bool
    """Decode rows are ordered by falling length, not as in the plan."""
    prefill_slots: list[int]
    prefill_starts: list[int]
    prefill_counts: list[int]
    prefill_first: list[int]
    prefill_tables: list[I32]
    result_slots: I32  # [num_rows] in the order of the result
    result_tokens: I64  # [num_states] which tokens' hidden states the rows of the result come from
    forks: list[tuple[int, int]]
    """(slot, slot of the row whose last state it shares) of the last rows of the result; the other rows have their own."""
    rows_version: int
    """Changes whenever `result_slots` or their parameters may have changed."""
    embedded: I64 | None = None  # [num_rows] which tokens have an embedding that the prompt brought
    embeds: U8 = field(default_factory=no_u8)
    """Those embeddings, in the bytes of the model's dtype."""
    whole: NDArray[np.bool_] | None = None
    """[num_tokens] which of them attend to all rows of their item, those behind them too; None: none does."""
    grid_positions: I64 | None = None
    """[3, num_tokens] positions on three axes, where a request of the step has rows in a grid; None: `positions` are all."""
    adapter_ids: I32 | None = None
    """[num_tokens] the slot of each token's adapter, 0 for none and for padding; None: no token has one."""
    num_prompts: list[int] = field(default_factory=list)
    """By prefill row, how many of its known tokens are of the prompt. Others were sampled, and are computed once more."""
    decode_sources: I64 | None = None
    """[num_decodes] how many rows of an encoder stand before the tokens of each row; None: the model has none."""
    prefill_sources: list[int] = field(default_factory=list)
    """By prefill row, the same; empty: the model has none."""
    pair_starts: list[int] = field(default_factory=list)
    """By prefill row, where the second text of a pair begins; 0: the tokens are of one text."""
    step: int = 0
    drafts: Drafts | None = None
    """Each draft is a decode row of its own, with the block table of its slot and one token more than the one before."""
    draft_tokens: I64 | None = None  # [drafts.counts.sum()] which tokens of the step they are
    token_slots: I32 = field(default_factory=no_i32)
    """[num_decodes] the slots of the decode rows in the order of the tokens, padding included. On a device a draft has its own."""
    between_layers: Callable[[], object] = bool
    """Called before each layer; see `ModelRunner.between_layers`."""
    saves: list[SavedState] = field(default_factory=list)
    """States of recurrent layers that the step keeps; those of a slot in the order of its tokens."""


class SavedState(NamedTuple):
    """What a slot has behind some of its tokens is kept."""

    slot: int
    position: int
    """How many tokens."""
    place: int


class Drafts(NamedTuple):
    """Guesses at the next tokens of the decode rows of one step."""

    counts: I32  # [num_rows]
    """How many each row has, in the order of the plan."""
    tokens: I32  # [counts.sum()]


@dataclass(slots=True)
class Columns:
    """One entry per slot."""

    is_live: NDArray[np.bool_]
    num_known: I32
    num_computed: I32
    num_outputs: I32
    """Index of the next token to be sampled within the output."""
    last_token: I32
    """The input of the slot's next decode row."""
    min_tokens: I32
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: I32
    seeds: NDArray[np.uint64]
    sample_index: I32
    pooling: NDArray[np.uint8]
    """How its vector is made (`messages.POOLING_CODES`); 0: it samples."""
    adapter_id: I32
    """The slot of its adapter; 0: none."""
    pair_start: I32
    """Where the second text of its prompt begins; 0: it has one, or the model does not tell them apart."""
    position_shift: I32
    """How far the positions behind its prompt lag behind the number of tokens, where rows of it stand in a grid."""
    num_source: I32
    """Rows of an encoder that stand before its tokens."""


_COLUMN_TYPES: dict[str, Any] = {
    "is_live": np.bool_,
    "num_known": np.int32,
    "num_computed": np.int32,
    "num_outputs": np.int32,
    "last_token": np.int32,
    "min_tokens": np.int32,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "top_k": np.int32,
    "seeds": np.uint64,
    "sample_index": np.int32,
    "pooling": np.uint8,
    "adapter_id": np.int32,
    "pair_start": np.int32,
    "position_shift": np.int32,
    "num_source": np.int32,
}


@dataclass(slots=True)
class PromptLogprobs:
    """What a slot still has to tell of its prompt."""

    num_top: int
    first: int
    """The first prompt token that is wanted."""
    num_prompt: int

    def of_chunk(self, start: int, count: int) -> tuple[int, int]:
        """The tokens [first, last) that the logits of this chunk of the prompt are about."""
        return max(self.first, start + 1), min(start + count + 1, self.num_prompt)


@dataclass(slots=True)
class PersistentBatch:
    """The worker's requests. Plans are trusted to be well ordered, and checked where a mistake would corrupt others."""

    vocab_size: int
    block_size: int
    num_blocks: int
    """Block ids are below this."""
    max_blocks: int
    """Most blocks of one sequence."""
    sort_gain: int = 2048
    """Padding, in tokens, above which decode rows are ordered by length."""
    num_groups: int = 1
    padding_block: int | None = None
    """Where rows without effect write; None: no padding."""
    embedding_bytes: int = 0
    """Of an embedding that is part of a prompt; 0: prompts have none."""
    max_adapters: int = 0
    """Slots for adapters; 0: rows have none."""
    has_sources: bool = False
    """The embeddings of a prompt are rows of an encoder, which stand before the tokens of the decoder."""
    num_snapshots: int | None = None
    """Places for states of recurrent layers behind prefixes; None: no layer is recurrent."""
    columns: Columns = field(init=False)
    block_tables: I32 = field(init=False)  # [num_groups, num_slots, max_blocks]
    num_slot_blocks: I32 = field(init=False)  # [num_groups, num_slots]
    decode_slots: I32 = field(init=False)
    known_tokens: dict[int, I32] = field(default_factory=dict)
    """Of slots that still have to prefill."""
    bad_slots: set[int] = field(default_factory=set)
    """Slots whose prompt had states that are not finite: what they sample is void."""
    grids: dict[int, I64] = field(default_factory=dict)
    """The positions [3, num_known] of slots that still have to prefill, if rows of theirs stand in a grid."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """Of slots that want them and have some to come."""
    rules: LogitRules = field(init=False)
    rows_version: int = 0
    decode_version: int = 0
    has_drafted: bool = False
    """The last step had drafts."""
    lane: int = 0
    """That `decode_slots` are of (`scheduling.lanes`)."""
    other_lanes: dict[int, I32] = field(default_factory=dict)
    """The decode rows of each other lane."""

    def __post_init__(self) -> None:
        self.rules = LogitRules(self.vocab_size)
        self.columns = Columns(**{name: np.zeros(0, kind) for name, kind in _COLUMN_TYPES.items()})
        self.block_tables = np.zeros((self.num_groups, 0, self.max_blocks), np.int32)
        self.num_slot_blocks = np.zeros((self.num_groups, 0), np.int32)
        self.decode_slots = np.zeros(0, np.int32)
        self._grow(SLOTS_AT_FIRST)

    @property
    def num_slots(self) -> int:
        """Room, not use."""
        return len(self.columns.is_live) - 1  # the last one is the padding slot's

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's differences: freed, new, extended, decode rows. Raises ValueError for an impossible one."""
        if plan.freed.size:
            self._free(plan.freed)
        if plan.new_rows.size:
            self._add(plan)
        if plan.extended_slots.size:
            self._extend(plan)
        is_changed = False
        if plan.lane.size and plan.lane.item(0) != self.lane:
            self.other_lanes[self.lane] = self.decode_slots
            self.lane = plan.lane.item(0)
            self.decode_slots = self.other_lanes.pop(self.lane, np.zeros(0, np.int32))
            is_changed = True
        # Freed, and perhaps new again: other blocks, other parameters.
        is_changed |= plan.freed.size > 0 and bool(np.isin(plan.freed, self.decode_slots).any())
        if plan.decode_slots is not None:
            self._require_live(plan.decode_slots, "decode")
            if not np.array_equal(self.decode_slots, plan.decode_slots):
                self.decode_slots = plan.decode_slots.copy()  # a plan's arrays may lie in a ring
                is_changed = True
        elif is_changed:
            self._require_live(self.decode_slots, "decode")
        if is_changed:
            self.decode_version += 1
            self.rows_version += 1

    def draft_room(self, max_model_len: int) -> I32:
        """How many drafts each decode row has room for, in its blocks and in the model's positions; 0 or less: none."""
        slots = self.decode_slots
        # The token of the last position is never an input: nothing may follow it.
        most = np.minimum(self.num_slot_blocks[0, slots] * self.block_size, max_model_len - 1)
        room: I32 = most - self.columns.num_computed[slots] - 1
        return room

    def inputs(self, plan: StepPlan, drafts: Drafts | None = None) -> StepInputs:
        """The tokens of the step, once `apply` is done."""
        columns, size = self.columns, self.block_size
        slots = self.decode_slots
        # A draft is a row of its own, behind that of its slot: it attends to what this and the drafts before it store.
        first_of_rows = np.arange(len(slots))
        ahead = np.zeros(len(slots), np.int64)
        if drafts is not None:
            runs = drafts.counts.astype(np.int64) + 1
            first_of_rows = np.cumsum(runs) - runs
            ahead = np.arange(int(runs.sum())) - np.repeat(first_of_rows, runs)
            slots = np.repeat(slots, runs)
        if drafts is not None or self.has_drafted:
            self.decode_version += 1  # rows grow by more than one token, and there are others
            self.has_drafted = drafts is not None
        num_rows = num_decodes = len(slots)
        if self.padding_block is not None and padded(num_rows) > num_rows:
            num_decodes = padded(num_rows)
            slots = np.concatenate((slots, np.full(num_decodes - num_rows, PADDING, np.int32)))
            ahead = np.concatenate((ahead, np.zeros(num_decodes - num_rows, np.int64)))
        lengths = columns.num_computed[slots].astype(np.int64) + 1
        if (columns.num_known[slots] != lengths).any():
            early = slots[columns.num_known[slots] != lengths]
            raise ValueError(f"step {plan.step}: decode rows {early.tolist()} have other than one token to compute")
        token_ids = columns.last_token[slots].astype(np.int64)
        if drafts is not None:
            lengths += ahead
            token_ids[np.flatnonzero(ahead)] = drafts.tokens
        order: I64 | None = None
        if num_decodes > 1 and int(lengths.max()) * num_decodes - int(lengths.sum()) > self.sort_gain:
            order = np.argsort(-lengths, kind="stable")
            slots, lengths, token_ids = slots[order], lengths[order], token_ids[order]
        positions = lengths - 1
        columns_of = positions // size
        if num_decodes and (columns_of >= self.num_slot_blocks[0, slots]).any():
            short = slots[columns_of >= self.num_slot_blocks[0, slots]]
            raise ValueError(f"step {plan.step}: decode rows {short.tolist()} have no block for their next token")
        tables = self.block_tables[0]
        kv_slots = tables[slots, columns_of].astype(np.int64) * size + positions % size
        widest = int(columns_of.max()) + 1 if num_decodes else 0
        places = np.arange(num_decodes)
        if order is not None:
            places[order] = np.arange(num_decodes)
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots,
            num_decodes=num_decodes,
            decode_slots=self.decode_slots,
            decode_lengths=lengths,
            decode_positions=positions,
            decode_version=self.decode_version,
            decode_table=tables[slots, :widest],
            is_sorted=order is not None,
            prefill_slots=[],
            prefill_starts=[],
            prefill_counts=[],
            prefill_first=[],
            prefill_tables=[],
            result_slots=self.decode_slots,
            result_tokens=places[first_of_rows],
            forks=[],
            rows_version=self.rows_version,
            embeds=NO_U8,
            step=plan.step,
            drafts=drafts,
            draft_tokens=None if drafts is None else places[np.flatnonzero(ahead)],
            token_slots=slots,
        )
        if plan.prefill_slots.size:
            self._add_prefill(plan, inputs)
        if self.max_adapters:
            self._add_adapters(slots, inputs)
        if self.has_sources:
            sources = self.columns.num_source
            inputs.decode_sources = sources[slots].astype(np.int64)
            inputs.prefill_sources = sources[inputs.prefill_slots].tolist()
        elif self.embedding_bytes:
            self._add_grid_positions(slots, inputs)
        if plan.saved_states.size:
            inputs.saves = self._saves(plan, inputs)
        return inputs

    def _saves(self, plan: StepPlan, inputs: StepInputs) -> list[SavedState]:
        """What the step is to keep of its rows. Raises ValueError for what these do not compute."""
        ends = {
            slot: (first, first + count)
            for slot, first, count in zip(
                inputs.prefill_slots, inputs.prefill_first, inputs.prefill_counts, strict=True
            )
        }
        for slot in self.decode_slots.tolist():
            computed = int(self.columns.num_computed[slot])
            ends[slot] = computed, computed + 1
        saves = sorted(SavedState(*row) for row in self._records(plan.saved_states, 3, plan.step))
        for save in saves:
            first, end = ends.get(save.slot, (0, 0))
            if not first < save.position <= end:
                raise ValueError(f"step {plan.step}: slot {save.slot} does not compute {save.position} tokens")
        return saves

    def _records(self, column: I32, width: int, step: int) -> list[list[int]]:
        """Of states of recurrent layers; the last number of each is a place."""
        if self.num_snapshots is None or column.size % width:
            raise ValueError(f"step {step}: {column.size} numbers are no states of recurrent layers in this worker")
        records: list[list[int]] = column.reshape(-1, width).tolist()
        for record in records:
            if not 0 <= record[-1] < self.num_snapshots:
                raise ValueError(
                    f"step {step}: there are {self.num_snapshots} places for states, not place {record[-1]}"
                )
        return records

    def restored(self, plan: StepPlan) -> list[list[int]]:
        """New slots whose first tokens are computed, with the places that their states are in.

        Raises ValueError where some have none.
        """
        records = self._records(plan.restored_states, 2, plan.step)
        new = plan.new
        begun = sorted(new["slot"][new["num_computed"] > 0].tolist())
        if sorted(slot for slot, _ in records) != begun:
            raise ValueError(
                f"step {plan.step}: slots {begun} begin with computed tokens, and states are named otherwise"
            )
        return records

    def _add_grid_positions(self, decode_slots: I32, inputs: StepInputs) -> None:
        """decode_slots: in the order of the tokens, with padding."""
        shifts = self.columns.position_shift[decode_slots]
        if not self.grids and not shifts.any():
            return
        made = np.tile(inputs.positions, (3, 1))
        made[:, : len(shifts)] -= shifts
        for slot, start, count, first in zip(
            inputs.prefill_slots, inputs.prefill_starts, inputs.prefill_counts, inputs.prefill_first, strict=True
        ):
            if slot in self.grids:
                made[:, start : start + count] = self.grids[slot][:, first : first + count]
        inputs.grid_positions = made

    def _add_adapters(self, decode_slots: I32, inputs: StepInputs) -> None:
        """decode_slots: in the order of the tokens, with padding."""
        column = self.columns.adapter_id
        decodes, prefills = column[decode_slots], column[inputs.prefill_slots]
        if decodes.any() or prefills.any():
            ids = np.zeros(len(inputs.token_ids), np.int32)
            ids[: len(decodes)] = decodes
            rows = np.repeat(prefills, inputs.prefill_counts)
            ids[len(decodes) : len(decodes) + len(rows)] = rows
            inputs.adapter_ids = ids

    def advance(self, inputs: StepInputs) -> None:
        """The step's forward succeeded: its tokens have their keys and values in the cache."""
        columns = self.columns
        columns.num_computed[inputs.decode_slots] += 1
        for slot, count in zip(inputs.prefill_slots, inputs.prefill_counts, strict=True):
            columns.num_computed[slot] += count
        for slot, _ in inputs.forks:
            columns.num_computed[slot] = columns.num_known[slot]
        if self.known_tokens:
            for slot in [s for s in self.known_tokens if columns.num_computed[s] == columns.num_known[s]]:
                del self.known_tokens[slot]
                self.grids.pop(slot, None)

    def store(self, slots: I32, tokens: I32) -> None:
        """What was sampled for these rows: the next plan may decode them without naming the tokens."""
        columns = self.columns
        columns.last_token[slots] = tokens
        columns.num_outputs[slots] += 1
        columns.num_known[slots] = columns.num_computed[slots] + 1
        if self.rules.has_memory:
            self.rules.store(slots, tokens)

    def accept(self, slots: I32) -> None:
        """What was sampled last for these rows is their next draft, whose keys and values are in the cache already."""
        self.columns.num_computed[slots] += 1

    def exclusive_blocks(self, slots: I32) -> I32:
        """The blocks of these slots that no other live slot holds."""
        mine: set[int] = set()
        others: set[int] = set()
        for group in range(self.num_groups):
            for slot in np.flatnonzero(self.columns.is_live).tolist():
                blocks = self.block_tables[group, slot, : self.num_slot_blocks[group, slot]].tolist()
                (mine if slot in slots else others).update(blocks)
        return np.array(sorted(mine - others), np.int32)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant of the module does not hold."""
        columns = self.columns
        live = np.flatnonzero(columns.is_live)
        assert (columns.num_computed[live] <= columns.num_known[live]).all(), "computed beyond what is known"
        waiting = {int(slot) for slot in self.known_tokens}
        assert waiting <= set(live.tolist()), "tokens kept of a dead slot"
        assert set(self.grids) <= waiting, "positions kept of a prefill that is over"
        assert self.bad_slots <= set(live.tolist()), "a dead slot is bad"
        assert set(self.prompt_logprobs) <= set(live.tolist()), "prompt logprobs kept of a dead slot"
        self.rules.check_integrity(set(live.tolist()))
        for slot, tokens in self.known_tokens.items():
            assert len(tokens) == columns.num_known[slot] > columns.num_computed[slot], "prefill is over"
        needed = -(-columns.num_computed[live] // self.block_size)
        assert (self.num_slot_blocks[:, live] >= needed).all(), "computed tokens without a block"
        assert columns.is_live[self.decode_slots].all(), "a decode row is not live"
        assert len(np.unique(self.decode_slots)) == len(self.decode_slots), "a decode row is there twice"
        for group in range(self.num_groups):
            for slot in live.tolist():
                used = self.block_tables[group, slot, : self.num_slot_blocks[group, slot]]
                assert ((used >= 0) & (used < self.num_blocks)).all(), "a block outside the cache"

    # The parts of `apply` ---------------------------------------------------------------------------------------------

    def _free(self, slots: I32) -> None:
        """A slot that is not in use is passed over: after a failed step, the scheduler frees all it knows of."""
        slots = slots[(slots >= 0) & (slots < self.num_slots)]
        self.columns.is_live[slots] = False
        self.num_slot_blocks[:, slots] = 0
        for slot in slots.tolist():
            self.known_tokens.pop(slot, None)
            self.grids.pop(slot, None)
            self.bad_slots.discard(slot)
            self.prompt_logprobs.pop(slot, None)
        if self.rules.is_used:
            self.rules.remove(slots)

    def _add(self, plan: StepPlan) -> None:
        new = plan.new
        slots, columns, num_tokens = new["slot"], self.columns, new["num_tokens"]
        # A plan is checked before anything is changed: a wrong index would write into another request's row.
        if int(slots.min()) < 0:
            raise ValueError(f"step {plan.step}: slot {int(slots.min())} is negative")
        if int(slots.max()) >= self.num_slots:
            self._grow(int(slots.max()) + 1)
            columns = self.columns
        if columns.is_live[slots].any() or len(np.unique(slots)) != len(slots):
            raise ValueError(f"step {plan.step}: one of the new slots {slots.tolist()} is in use")
        if (new["num_computed"] >= num_tokens).any() or (new["num_computed"] < 0).any():
            raise ValueError(f"step {plan.step}: a new slot must have at least one token that is not computed")
        lowest = LOWEST_ID if self.embedding_bytes else 0
        if plan.new_tokens.min(initial=0) < lowest or plan.new_tokens.max(initial=0) >= self.vocab_size:
            raise ValueError(f"step {plan.step}: token ids must be in [0, {self.vocab_size})")
        if int(new["adapter_id"].min()) < 0 or int(new["adapter_id"].max()) > self.max_adapters:
            raise ValueError(f"step {plan.step}: this worker has {self.max_adapters} slots for adapters")
        self._require_blocks(plan.new_blocks, plan.step)
        counts = plan.new_num_blocks.reshape(-1, self.num_groups)
        if len(counts) != len(slots) or counts.max(initial=0) > self.max_blocks:
            raise ValueError(f"step {plan.step}: a new slot can have at most {self.max_blocks} blocks per group")
        # One assignment per column for all new rows.
        columns.is_live[slots] = True
        columns.num_known[slots] = num_tokens
        columns.num_computed[slots] = new["num_computed"]
        columns.num_outputs[slots] = new["num_outputs"]
        columns.min_tokens[slots] = new["min_tokens"]
        columns.temperature[slots] = new["temperature"]
        columns.top_p[slots] = new["top_p"]
        columns.min_p[slots] = new["min_p"]
        columns.top_k[slots] = new["top_k"]
        columns.seeds[slots] = new["seed"]
        columns.sample_index[slots] = new["sample_index"]
        columns.pooling[slots] = new["pooling"] & 0xFF
        columns.adapter_id[slots] = new["adapter_id"]
        columns.pair_start[slots] = new["pooling"] >> 8
        columns.position_shift[slots] = 0
        self.num_slot_blocks[:, slots] = counts.T
        # Ragged parts, row by row: tokens, blocks and stop ids of all rows follow each other.
        token_ends = np.cumsum(num_tokens)
        stop_ends = np.cumsum(new["num_stop_ids"])
        block_end = 0
        for i, slot in enumerate(slots.tolist()):
            tokens = plan.new_tokens[token_ends[i] - num_tokens[i] : token_ends[i]].copy()
            self.known_tokens[slot] = tokens
            columns.last_token[slot] = tokens[-1]
            columns.num_source[slot] = np.count_nonzero(tokens < 0) if self.has_sources else 0
            if self.embedding_bytes and int(tokens.min()) < GRID:
                self.grids[slot], columns.position_shift[slot] = grid_positions(tokens)
            for group in range(self.num_groups):
                count = int(counts[i, group])
                self.block_tables[group, slot, :count] = plan.new_blocks[block_end : block_end + count]
                block_end += count
            # Stop ids are taken out of the logits until there are min_tokens.
            if new["min_tokens"][i] > new["num_outputs"][i]:
                ids = plan.new_stop_ids[stop_ends[i] - new["num_stop_ids"][i] : stop_ends[i]]
                known = ids[(ids >= 0) & (ids < self.vocab_size)].astype(np.int64)
                self.rules.hold_back(slot, known, int(new["min_tokens"][i]))
        if plan.new_rules.size:
            self._add_rules(plan)

    def _add_rules(self, plan: StepPlan) -> None:
        num_outputs = dict(zip(plan.new["slot"].tolist(), plan.new["num_outputs"].tolist(), strict=True))
        for slot, first, rules in decode_rules(plan.new_rules, plan.new_rule_numbers):
            if slot not in num_outputs:
                raise ValueError(f"step {plan.step}: rules for slot {slot}, which is not new")
            tokens = self.known_tokens[slot]
            num_prompt = len(tokens) - num_outputs[slot]
            prompt = tokens[:num_prompt]
            if self.embedding_bytes:
                prompt = prompt[prompt >= 0]
            self.rules.add(slot, rules, prompt, tokens[num_prompt:])
            if rules.num_prompt_logprobs >= 0 and first < num_prompt:
                self.prompt_logprobs[slot] = PromptLogprobs(rules.num_prompt_logprobs, first, num_prompt)

    def _extend(self, plan: StepPlan) -> None:
        slots, groups = plan.extended_slots, plan.extended_groups
        if not groups.size:
            groups = np.zeros(len(slots), np.uint8)
        self._require_live(slots, "extended")
        self._require_blocks(plan.extended_blocks, plan.step)
        if len(slots) != len(plan.extended_blocks) or len(slots) != len(groups) or groups.max() >= self.num_groups:
            raise ValueError(f"step {plan.step}: extended slots, blocks and groups do not fit each other")
        keys = slots.astype(np.int64) * self.num_groups + groups
        if len(np.unique(keys)) == len(keys):
            where = self.num_slot_blocks[groups, slots]
            if int(where.max()) >= self.max_blocks:
                raise ValueError(f"step {plan.step}: a slot would have more than {self.max_blocks} blocks")
            self.block_tables[groups, slots, where] = plan.extended_blocks
            self.num_slot_blocks[groups, slots] += 1
            return
        for slot, block, group in zip(slots.tolist(), plan.extended_blocks.tolist(), groups.tolist(), strict=True):
            where = self.num_slot_blocks[group, slot]
            if where >= self.max_blocks:
                raise ValueError(f"step {plan.step}: slot {slot} would have more than {self.max_blocks} blocks")
            self.block_tables[group, slot, where] = block
            self.num_slot_blocks[group, slot] = where + 1

    def _add_prefill(self, plan: StepPlan, inputs: StepInputs) -> None:
        columns, size, tables = self.columns, self.block_size, self.block_tables[0]
        self._require_live(plan.prefill_slots, "prefill")
        token_ids, positions, kv_slots = [inputs.token_ids], [inputs.positions], [inputs.kv_slots]
        finished, finished_tokens = [], []
        start = inputs.num_decodes
        for slot, count in zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True):
            first = int(columns.num_computed[slot])
            end = first + count
            if count < 1 or slot not in self.known_tokens or end > columns.num_known[slot]:
                raise ValueError(f"step {plan.step}: slot {slot} has no {count} known tokens left to prefill")
            if -(-end // size) > self.num_slot_blocks[0, slot]:
                raise ValueError(f"step {plan.step}: slot {slot} has no blocks for {end} tokens")
            span = np.arange(first, end)
            token_ids.append(self.known_tokens[slot][first:end].astype(np.int64))
            positions.append(span)
            kv_slots.append(tables[slot, span // size].astype(np.int64) * size + span % size)
            inputs.prefill_slots.append(slot)
            inputs.prefill_starts.append(start)
            inputs.prefill_counts.append(count)
            inputs.prefill_first.append(first)
            inputs.num_prompts.append(int(columns.num_known[slot] - columns.num_outputs[slot]))
            inputs.pair_starts.append(int(columns.pair_start[slot]))
            inputs.prefill_tables.append(tables[slot].copy())
            start += count
            if end == columns.num_known[slot]:
                finished.append(slot)
                finished_tokens.append(start - 1)
        if self.padding_block is not None and padded(start) > start:
            missing = np.zeros(padded(start) - start, np.int64)
            token_ids.append(missing)
            positions.append(missing)
            kv_slots.append(missing + self.padding_block * size)
        inputs.token_ids = np.concatenate(token_ids)
        if self.embedding_bytes:
            self._take_embeds(plan, inputs)
        inputs.positions = np.concatenate(positions)
        inputs.kv_slots = np.concatenate(kv_slots)
        if plan.new_rows.size and int(plan.new["source"].max()) >= 0:
            inputs.forks = self._forks(plan, finished)
            finished += [slot for slot, _ in inputs.forks]
        if finished:
            inputs.result_tokens = np.concatenate((inputs.result_tokens, np.array(finished_tokens, np.int64)))
            inputs.result_slots = np.concatenate((inputs.result_slots, np.array(finished, np.int32)))
            self.rows_version += 1  # these rows are of this step only
            inputs.rows_version = self.rows_version
            self.rows_version += 1

    def _take_embeds(self, plan: StepPlan, inputs: StepInputs) -> None:
        embedded = np.flatnonzero(inputs.token_ids < 0)
        if embedded.size * self.embedding_bytes != plan.embeds.size:
            raise ValueError(
                f"step {plan.step}: {plan.embeds.size} bytes of embeddings are not {self.embedding_bytes} for each of "
                f"{embedded.size} tokens"
            )
        if embedded.size:
            is_whole = inputs.token_ids == WHOLE
            inputs.whole = is_whole if is_whole.any() else None
            inputs.token_ids[embedded] = 0  # something to look up
            inputs.embedded, inputs.embeds = embedded, plan.embeds

    def _forks(self, plan: StepPlan, finished: list[int]) -> list[tuple[int, int]]:
        """The new slots that share one of the prompts that end in this step, each with the slot of that."""
        new = plan.new
        pairs: list[tuple[int, int]] = new[["slot", "source"]][new["source"] >= 0].tolist()
        for slot, source in pairs:
            if source not in finished or not np.array_equal(self.known_tokens[slot], self.known_tokens[source]):
                raise ValueError(f"step {plan.step}: slot {slot} cannot be a fork of slot {source}")
        return pairs

    def _require_live(self, slots: I32, what: str) -> None:
        if slots.size and (int(slots.min()) < 0 or int(slots.max()) >= self.num_slots):
            raise ValueError(f"{what} slots {slots.tolist()} are not all in use")
        if not self.columns.is_live[slots].all():
            dead = slots[~self.columns.is_live[slots]]
            raise ValueError(f"{what} slots {dead.tolist()} are not in use")

    def _require_blocks(self, blocks: I32, step: int) -> None:
        if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= self.num_blocks):
            raise ValueError(f"step {step}: block ids must be in [0, {self.num_blocks})")

    def _grow(self, num_slots: int) -> None:
        """Room for at least so many slots; doubles, so that growing stays rare."""
        old = max(0, self.num_slots)
        new = max(num_slots, 2 * old) + 1
        for name, kind in _COLUMN_TYPES.items():
            column = np.zeros(new, kind)
            column[:old] = getattr(self.columns, name)[:old]
            setattr(self.columns, name, column)
        tables = np.zeros((self.num_groups, new, self.max_blocks), np.int32)
        tables[:, :old] = self.block_tables[:, :old]
        self.block_tables = tables
        counts = np.zeros((self.num_groups, new), np.int32)
        counts[:, :old] = self.num_slot_blocks[:, :old]
        self.num_slot_blocks = counts
        self.columns.num_known[PADDING] = 1
        if self.padding_block is not None:
            self.block_tables[:, PADDING, 0] = self.padding_block
            self.num_slot_blocks[:, PADDING] = 1
