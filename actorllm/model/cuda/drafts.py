"""Drafts in a step on a device: which rows it gets for them, and how many of them were right.

A draft is a decode row of its own, as on the CPU. What a decode row is, the state table says. So each draft has a slot of the table
for the time of a step, behind those of requests (`StateTable.add_drafts`). It has the block table, the parameters and the noise of
its request, moved on by the drafts before it. Such a step launches what a step of so many rows launches. Its graph is that of the
sum of its rows and drafts, and its kernels are those of any step.

The ordinary sampler chooses a token at every row at once. A row counts if all drafts up to it are the tokens that were sampled
before them (`right_runs`). Rules with a memory see the drafts before a row as if they had been sampled (`edits_of`). Another step
of these rows depends on the outcome, so such a step is finished first.

Pure but for what it names. Used by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32, U32, LateInputs
from actorllm.model.inputs import Drafts, StepInputs
from actorllm.model.logits import EditList, LogitRules, masks_behind
from actorllm.types.drafter import Speculation

I64 = NDArray[np.int64]

MAX_DRAFT_SLOTS = 256
"""Of all rows of a step; what larger batches are allowed beyond them is not drafted."""


def num_draft_slots(speculation: Speculation | None, max_num_seqs: int) -> int:
    """How many drafts a step has room for."""
    return 0 if speculation is None else min(max_num_seqs * speculation.num_speculative_tokens, MAX_DRAFT_SLOTS)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows for which a step samples a token, in the order of the sampler: [num_rows] each."""

    slots: I32
    """Whose token it is."""
    ahead: I32
    """How many drafts of the slot come before it."""
    results: I32
    """Which row of the result it belongs to."""
    table_rows: I32
    """Which row of the state table it is."""
    tokens: I64
    """Which token of the step has its hidden state."""
    firsts: I64
    """[num_samples] where the rows without a draft before them are, in the order of the samples."""
    drafts: I64
    """[num_drafts] where the rows of the drafts are, in their order."""

    @property
    def num_rows(self) -> int:
        return len(self.slots)


def sampled_rows(inputs: StepInputs, slots: I32, states: NDArray[np.intp] | None, first_draft_slot: int) -> SampledRows:
    """Lay out a step with drafts, and name the slots of its drafts in `inputs.token_slots`.

    A step of decode rows alone samples in the order of its tokens: they are all there is. Else the samples come first.

    Arguments:
        slots, states: of the samples of the step (`SamplingRows`).
        first_draft_slot: of the state table.
    """
    drafts, of_drafts = inputs.drafts, inputs.draft_tokens
    assert drafts is not None
    assert of_drafts is not None
    counts = drafts.counts.astype(np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    ahead = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    num_samples, num_drafts = len(slots), len(rows)
    inputs.token_slots[of_drafts] = draft_slots = np.arange(
        first_draft_slot, first_draft_slot + num_drafts, dtype=np.int32
    )
    of_samples = inputs.result_tokens if states is None else inputs.result_tokens[states]
    columns = [
        np.concatenate((slots, inputs.decode_slots[rows])),
        np.concatenate((np.zeros(num_samples, np.int32), ahead)),
        np.concatenate((np.arange(num_samples), rows)),
        np.concatenate((slots, draft_slots)),
        np.concatenate((of_samples, of_drafts)),
    ]
    places = np.arange(num_samples + num_drafts)
    if not inputs.prefill_slots:
        order = np.argsort(columns[-1], kind="stable")
        columns = [column[order] for column in columns]
        places[order] = np.arange(len(order))
    of_slots, of_ahead, results, table_rows, tokens = columns
    return SampledRows(
        of_slots.astype(np.int32),
        of_ahead.astype(np.int32),
        results.astype(np.int32),
        table_rows.astype(np.int32),
        tokens.astype(np.int64),
        places[:num_samples],
        places[num_samples:],
    )


def right_runs(
    rows: SampledRows, drafts: Drafts, tokens: I32, is_void: NDArray[np.bool_], late: LateInputs | None
) -> I32:
    """How many tokens each sample of a step has: one, and one for each draft that is the token sampled before it.

    A row with masks goes as far as these. A row that is void ends before that: its next step finds the same, and reports it.

    Arguments:
        tokens, is_void: of the rows of the sampler.
        late: the masks of the step.
    """
    runs = np.ones(len(rows.firsts), np.int32)
    most = drafts.counts.copy()
    if late is not None and late.slots.size:
        num_masks = dict(zip(late.slots.tolist(), late.counts.tolist() or [1] * late.slots.size, strict=True))
        slots = rows.slots[rows.firsts[: len(most)]].tolist()
        most = np.minimum(most, [num_masks.get(slot, int(most.max()) + 1) - 1 for slot in slots])
    starts = np.cumsum(drafts.counts) - drafts.counts
    here = np.flatnonzero((most > 0) & ~is_void[rows.firsts[: len(most)]])
    before = rows.firsts[here]  # rows of the sampler
    position = 0
    while here.size:
        place = starts[here] + position
        behind = rows.drafts[place]
        is_right = (tokens[before] == drafts.tokens[place]) & ~is_void[behind]
        runs[here[is_right]] += 1
        position += 1
        goes_on = is_right & (most[here] > position)
        here, before = here[goes_on], behind[goes_on]
    return runs


def edits_of(
    rules: LogitRules, rows: SampledRows, drafts: Drafts, num_outputs: I32, late: LateInputs | None
) -> tuple[EditList, dict[int, U32]]:
    """What rules and grammars do to the logits of the rows of a sampler, and by row the masks of those that have one.

    Each row has what it would have if the drafts before it had been sampled: only then does it count.

    Arguments:
        num_outputs: how many tokens of output each slot has, by slot, before the step.
        late: the masks of grammars.
    """
    trial = rules.trial()
    penalties = np.zeros((3, rows.num_rows), np.float32)
    found: list[EditList] = []
    masks: dict[int, U32] = {}
    starts = np.cumsum(drafts.counts) - drafts.counts
    for position in range(int(drafts.counts.max(initial=0)) + 1):
        here = np.flatnonzero(rows.ahead == position)
        slots = rows.slots[here]
        edits = trial.edits(slots, num_outputs[slots] + np.int32(position))
        found.append(EditList(here[edits.row].astype(np.int32), edits.id, edits.bias, edits.count, edits.penalties))
        penalties[:, here] = edits.penalties
        masks |= {int(here[row]): mask for row, mask in trial.masks(slots).items()}
        if late is not None and late.slots.size:
            add_masks(masks, here, slots, masks_behind(late, position, rules.vocab_size))
        decodes = np.flatnonzero(drafts.counts > position)
        trial.store(rows.slots[rows.firsts[decodes]], drafts.tokens[starts[decodes] + position])
    row, id, count = (np.concatenate([getattr(edits, name) for edits in found]) for name in ("row", "id", "count"))
    return EditList(row, id, np.concatenate([edits.bias for edits in found]), count, penalties), masks


def add_masks(masks: dict[int, U32], rows: NDArray[np.intp], slots: I32, late: LateInputs) -> None:
    """Let rows choose only what grammars allow, too. rows: of the sampler, with the slot of each. late: one mask for a slot."""
    if not late.slots.size:
        return
    words: NDArray[np.uint32] = late.allowed.reshape(len(late.slots), -1)
    for slot, mask in zip(late.slots.tolist(), words, strict=True):
        for row in rows[slots == slot].tolist():
            masks[row] = masks[row] & mask if row in masks else mask
