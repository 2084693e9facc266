"""`DeviceDraftModel`: a second, smaller model on the device, which drafts for the first (`speculative_config`, "draft_model").

It is a runner with a cache and a state table of its own. Slots and block tables are those of the target. Plans of the
target bring its requests and its prompts (`apply`). A draft is a few steps of it, launched one behind the other, and waited for
at the end. The first has whatever the model has not seen of a row: its newest token, or a piece as of a prompt. What it samples has
the noise of the target's token at that place. So both choose the same token where their distributions agree. Rules of requests
have no part in its drafts.

Invariant: of each slot `computed` tokens have their keys and values, unless a block was published by a row that drafted nothing.
Called by the target's runner between two of its steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actorllm.config import EngineConfig
from actorllm.messages import I32, NO_I32, NO_U8, StepPlan, StepResult
from actorllm.model.cuda.decoder import SWITCHES
from actorllm.model.cuda.state import DeviceBatch, StateTable
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.inputs import PersistentBatch
from actorllm.model.runner import StepHandle
from actorllm.model.speculation.draft_shape import draft_config
from actorllm.model.speculation.histories import Histories

CATCH_UP_TOKENS = 256
"""Tokens of a step that rows which lag behind are brought forward by; others wait for the next step, without drafts."""


class DraftingRunner(Protocol):
    """A runner, as it is seen here."""

    batch: DeviceBatch
    state: StateTable

    @property
    def block_bytes(self) -> int: ...
    def load(self) -> None: ...
    def allocate(self, num_blocks: int) -> None: ...
    def apply(self, plan: StepPlan) -> None: ...
    def execute(self, plan: StepPlan) -> Any: ...
    def finish(self, handle: Any) -> StepResult: ...


def draft_engine(config: EngineConfig) -> tuple[EngineConfig, DecoderConfig]:
    """The configuration of the runner that drafts, and the shape of its model. Raises ModelError."""
    assert config.speculation is not None
    assert config.speculation.model is not None
    model, shape = draft_config(config.model, config.speculation.model, SWITCHES)
    return replace(
        config,
        model=replace(model, logits_processors=(), quantization_twin=None, scheme=None),
        speculation=None,
        lora=None,
    ), shape


class DeviceDraftModel:
    """See the module docstring.

    Arguments:
        runner: of the draft model, made of `draft_engine`.
        is_greedy: drafts are the most likely tokens (`draft_sample_method`).
    """

    def __init__(self, runner: DraftingRunner, *, is_greedy: bool) -> None:
        self.runner = runner
        self._is_greedy = is_greedy
        self.computed: NDArray[np.int32] = np.zeros(0, np.int32)
        self._drafted: NDArray[np.int32] = np.zeros(0, np.int32)
        """By slot, how many drafts of the last step have their keys and values, too."""

    def apply(self, plan: StepPlan) -> None:
        """Take over what a plan of the target says of requests and blocks, and compute its prompts."""
        mine = self._plan_of(plan)
        if mine.prefill_slots.size:
            self.runner.execute(mine)  # what it samples is of no use: the target has sampled there
        else:
            self.runner.apply(mine)
        columns, missing = self.runner.batch.columns, self.runner.batch.num_slots - self.computed.size
        if missing > 0:
            none = np.zeros(missing, np.int32)
            self.computed, self._drafted = (np.concatenate((x, none)) for x in (self.computed, self._drafted))
        for slots in (mine.prefill_slots, mine.new["slot"] if mine.new_rows.size else NO_I32):
            self.computed[slots] = columns.num_computed[slots]
            self._drafted[slots] = 0

    def _plan_of(self, plan: StepPlan, **differences: Any) -> StepPlan:
        """What a plan of the target says to this model."""
        mine: dict[str, Any] = {
            "new_rows": self._rows_of(plan),
            "new_tokens": np.maximum(plan.new_tokens, 0),  # a position whose prompt is an embedding has some token
            "new_stop_ids": NO_I32,
            "new_rules": NO_I32,
            "new_rule_numbers": np.zeros(0, np.float32),
            "new_processed": NO_U8,
            "new_salts": NO_U8,
            "embeds": NO_U8,
            "decode_slots": NO_I32,
            "late_slots": NO_I32,
            "max_drafts": 0,
        }
        return replace(plan, **(mine | differences))

    def _rows_of(self, plan: StepPlan) -> NDArray[np.uint8]:
        """The new rows without what concerns the target alone."""
        if not plan.new_rows.size:
            return NO_U8
        new = plan.new.copy()
        for name in ("adapter_id", "num_stop_ids", "min_tokens"):
            new[name] = 0
        if self._is_greedy:
            new["temperature"] = 0
        return new.view(np.uint8)

    def catch_up(self, batch: PersistentBatch, histories: Histories, unknown: I32) -> None:
        """Bring decode rows forward that have waited for long. Called before each step of the target.

        This model does so when it drafts.

        unknown: slots whose newest token is still being sampled.
        """
        return

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        """As `speculation.speculator.BatchDrafter`: what the model samples behind the known tokens of each row."""
        lags = batch.columns.num_known[slots] - self.computed[slots]
        counts = self._counts(histories, slots, lags)
        self._stand_where(batch, histories, slots, lags, counts)
        rows = np.flatnonzero(counts == lags)  # those that get to their newest token
        single, several = slots[(lags == 1) & (counts == 1)], (counts > 0) & (lags > 1)
        if counts.any():
            self._feed(single, slots[several], counts[several])
        self.computed[slots] += counts
        self._drafted[slots] = 0
        found: list[list[int]] = [[] for _ in slots]
        if not counts.any():
            return found
        first = StepPlan(step=0, decode_slots=single, prefill_slots=slots[several], prefill_counts=counts[several])
        under_way: deque[StepHandle[Any]] = deque([self.runner.execute(first)])
        for position in range(1, int(wanted[rows].max(initial=0))):
            here = slots[rows[wanted[rows] > position]]
            self._drafted[here] += 1
            under_way.append(self.runner.execute(StepPlan(step=0, decode_slots=here)))
        row_of = {int(slot): row for row, slot in enumerate(slots.tolist())}
        while under_way:
            handle = under_way.popleft()
            for slot, token in zip(
                handle.sampling.slots.tolist(), self.runner.finish(handle).tokens.tolist(), strict=True
            ):
                found[row_of[slot]].append(token)
        return found

    def _feed(self, single: I32, several: I32, counts: I32) -> None:
        """Something beside the tokens of the first pass. counts: of tokens of `several`; `single` have one each."""
        return

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        """The last draft of a row has not been through this model."""
        kept = np.minimum(num_accepted, self._drafted[slots])
        self.computed[slots] += np.where(num_drafted > 0, kept, 0).astype(np.int32)
        self._drafted[slots] = 0

    def _counts(self, histories: Histories, slots: I32, lags: I32) -> I32:
        """How many tokens of each row go through the model in its first step."""
        counts = np.ones(len(slots), np.int32)
        room = CATCH_UP_TOKENS
        for row in np.flatnonzero(lags != 1).tolist():
            history = histories.of(int(slots[row]))
            is_known = history is not None and 0 < lags[row] <= history.tokens.size
            counts[row] = min(room, int(lags[row])) if is_known else 0
            room -= int(counts[row])
        return counts

    def _stand_where(self, batch: PersistentBatch, histories: Histories, slots: I32, lags: I32, counts: I32) -> None:
        """Let the rows of this model be those of the target, with what is computed here."""
        mine, known = self.runner.batch, batch.columns.num_known[slots]
        mine.columns.num_known[slots] = known
        mine.columns.num_computed[slots] = self.computed[slots]
        mine.columns.num_outputs[slots] = batch.columns.num_outputs[slots]
        newest = np.zeros(len(slots), np.int32)
        for row, slot in enumerate(slots.tolist()):
            mine.known_tokens.pop(slot, None)
            if not counts[row]:
                continue
            history = histories.of(slot)
            assert history is not None
            newest[row] = max(0, int(history.tokens[-1]))
            if lags[row] > 1:
                lag = int(lags[row])
                tokens: I32 = np.zeros(known[row], np.int32)
                tokens[-lag:] = np.maximum(history.tokens[-lag:], 0)
                mine.known_tokens[slot] = tokens
        self.runner.state.settle(mine, slots, newest)
