"""`DraftingModel`: a model beside the target in one worker, which drafts in passes: its caches, its inputs, and how it samples.

The first pass of a draft has the tokens of a row that the model has not seen, each later pass one draft. Its KV cache is its own,
under the block tables of the target. A draft is drawn with the noise of the target's token at its position, and by the same
rules. What such a model computes changes how many drafts are right, and no token. Owned by the runner.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.config import EngineConfig
from actorllm.messages import I32, StepPlan
from actorllm.model.cpu.attention import PagedCache
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.inputs import PADDING, PersistentBatch, StepInputs, padded
from actorllm.model.sampler import Sampler, SamplingColumns
from actorllm.model.speculation.histories import Histories
from actorllm.types.weight_version import WeightSource

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

MAX_LOGITS_BYTES = 32 << 20
"""float32 logits of one pass; rows beyond them draft nothing."""


class DraftingModel(ABC):
    """See the module docstring.

    Arguments:
        config: of the engine.
        vocab_size: of the target.
    """

    cache: PagedCache

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        assert config.speculation is not None
        self._config = config
        self._vocab_size = vocab_size
        self._is_greedy = config.speculation.draft_sample_method == "greedy"
        self._sampler = Sampler(vocab_size)
        self.computed: NDArray[np.int32] = np.zeros(0, np.int32)
        """By slot, how many tokens have their keys and values in the cache."""
        self._version = 0
        self.num_failures = 0
        """Passes whose states were not finite."""

    # What a model of this kind has ------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, target: Decoder, show_progress: bool | None) -> None:
        """Read the weights, or draw them. Raises ModelError."""

    def stage(self, target: Decoder, source: WeightSource) -> Any:
        """Read what this model has in the target's checkpoint; nothing changes. None: it has nothing there, and keeps its weights.

        target: with the weights of `source`. Raises ModelError.
        """
        return None

    def take_target(self, target: Decoder, staged: Any) -> None:
        """The target has other weights from here on. staged: what `stage` returned."""
        return

    def drop_target(self) -> None:
        """Let go of the weights of the target, until `take_target`."""
        return

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Memory of one KV block over all layers."""

    @property
    def fixed_bytes(self) -> int:
        """Memory beside the blocks, once rows draft."""
        return 0

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """A cache with as many blocks as the target's; pages are mapped when they are first written."""

    @abstractmethod
    def apply(self, plan: StepPlan, batch: PersistentBatch) -> None:
        """New slots: what of them is in the cache already was computed by an earlier request."""

    @abstractmethod
    def follow(self, inputs: StepInputs, states: torch.Tensor) -> torch.Tensor | None:
        """The target has computed a step: the prompts of it go through this model, too.

        states: [num_tokens, hidden_size], before the final norm. Returns what `keep` is to have of the decode rows.
        """

    def keep(self, batch: PersistentBatch, inputs: StepInputs, seen: torch.Tensor, runs: I32) -> None:
        """The target has sampled a step. seen: what `follow` returned. runs: how many tokens each decode row has got."""
        return

    def catch_up(self, batch: PersistentBatch, histories: Histories) -> None:
        """Bring decode rows forward that have waited for long. Called before each step whose rows may draft."""
        return

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        """What became of the drafts of a step, by row."""
        return

    @abstractmethod
    def _ready(self, batch: PersistentBatch, histories: Histories, slots: I32) -> NDArray[np.intp]:
        """Which of the rows can draft."""

    @abstractmethod
    def _begin(self, slots: I32, counts: I64) -> torch.Tensor | None:
        """What the first pass of these slots is given beside so many tokens of each, by token. They are seen from here on."""

    @abstractmethod
    def _compute(
        self, inputs: StepInputs, last: I64, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """One pass. last: the last tokens of the rows.

        Returns float32 logits of the rows, [num_rows, vocab_size], and what the next pass is given of each; None: something was
        not finite.
        """

    def _drafts_stored(self, slots: I32) -> None:
        """The keys and values of one more draft of each of these slots are in the cache."""
        return

    # Passes -----------------------------------------------------------------------------------------------------------

    def zero(self, block_ids: I32) -> None:
        self.cache.zero(block_ids)

    def copy(self, sources: I32, targets: I32) -> None:
        self.cache.copy(sources, targets)

    def release(self) -> None:
        self.cache.release()

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        """The drafts of decode rows.

        Arguments:
            batch: of the target.
            slots: of the rows, [num_rows].
            wanted: how many drafts each is to have, [num_rows], at least 1.
        """
        found: list[list[int]] = [[] for _ in slots]
        most_rows = max(1, MAX_LOGITS_BYTES // (4 * self._vocab_size))
        rows = self._ready(batch, histories, slots)[:most_rows]
        if not rows.size:
            return found
        # The first pass has what is known and not computed yet, the last token included; each later pass one draft.
        known = batch.columns.num_known[slots[rows]].astype(np.int64)
        starts = self.computed[slots[rows]].astype(np.int64)
        tokens = newest_of(histories, slots[rows], known - starts)
        counts = known - starts
        given = self._begin(slots[rows], counts)
        self.computed[slots[rows]] = known
        columns: SamplingColumns | None = None
        position = 0
        self._version += 1
        while True:
            here = slots[rows]
            inputs, last = decode_inputs(batch, here, starts, counts, tokens, self._version)
            computed = self._compute(inputs, last, given)
            if computed is None:
                break
            logits, given = computed
            index = batch.columns.num_outputs[here] + np.int32(position)
            if batch.rules.concerns(here):
                batch.rules.apply(logits.numpy(), here, index)
            if columns is None:
                columns = self._columns(batch, here)
            columns.token_index[:] = index
            tokens = self._sampler.sample(logits, columns).astype(np.int64)
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                found[row].append(token)
            position += 1
            goes_on = wanted[rows] > position
            if not goes_on.any():
                break
            if not goes_on.all() or counts.max() > 1:
                self._version += 1  # other rows
                columns = None
            rows, tokens = rows[goes_on], tokens[goes_on]
            given = given[torch.from_numpy(np.flatnonzero(goes_on))]
            starts, counts = (starts + counts)[goes_on], np.ones(len(rows), np.int64)
            self._drafts_stored(slots[rows])
        return found

    def try_pass(self, batch: PersistentBatch, slots: I32) -> None:
        """One pass over these rows as it is made for a draft, of which nothing is used: it shows what a draft costs.

        It has the newest two tokens of each row, as the first pass behind a step whose drafts were all right.
        """
        self._version += 1
        starts = batch.columns.num_computed[slots].astype(np.int64) - 1
        tokens = batch.columns.last_token[slots].astype(np.int64).repeat(2)
        inputs, last = decode_inputs(batch, slots, starts, np.full(len(slots), 2, np.int64), tokens, self._version)
        computed = self._compute(inputs, last, self._nothing_given(2 * len(slots)))
        if computed is not None:
            self._sampler.sample(computed[0], self._columns(batch, slots))

    def _nothing_given(self, num_tokens: int) -> torch.Tensor | None:
        """In place of what a pass is given."""
        return None

    def _columns(self, batch: PersistentBatch, slots: I32) -> SamplingColumns:
        if self._is_greedy:
            return SamplingColumns.greedy(len(slots))
        return SamplingColumns.of_slots(batch.columns, slots)

    def _finite(self, inputs: StepInputs, states: torch.Tensor) -> bool:
        """Whether the states of a pass are finite. What the others have stored is cleared."""
        is_finite = np.isfinite(states.sum(1, dtype=torch.float32).numpy())
        if is_finite.all():
            return True
        self.cache.clear(inputs, np.flatnonzero(~is_finite))
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning("the draft model's states are not finite; such rows are computed without drafts")
        return False


# Inputs ---------------------------------------------------------------------------------------------------------------


def newest_of(histories: Histories, slots: I32, counts: I64) -> I64:
    """The newest tokens of some slots, one slot behind the other."""
    return np.concatenate([newest(histories, slot, n) for slot, n in zip(slots.tolist(), counts.tolist(), strict=True)])


def newest(histories: Histories, slot: int, count: int) -> I64:
    """The newest tokens of a slot. A position whose prompt is an embedding has some token in its place."""
    history = histories.of(slot)
    assert history is not None
    tokens = history.tokens
    return np.maximum(tokens[tokens.size - count :], 0).astype(np.int64)


def decode_inputs(
    batch: PersistentBatch, slots: I32, starts: I64, counts: I64, tokens: I64, version: int
) -> tuple[StepInputs, I64]:
    """Some consecutive tokens of each slot, each a decode row of its own; and which are the last ones.

    version: changes where the rows are others than in the pass before.
    """
    size = batch.block_size
    ends = np.cumsum(counts)
    rows = np.repeat(slots, counts)
    positions = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
    missing = padded(len(rows)) - len(rows)
    rows = np.concatenate((rows, np.full(missing, PADDING, np.int32)))
    positions = np.concatenate((positions, np.zeros(missing, np.int64)))
    tokens = np.concatenate((tokens, np.zeros(missing, np.int64)))
    table = batch.block_tables[0][rows, : int(positions.max()) // size + 1]
    places = table[np.arange(len(rows)), positions // size].astype(np.int64)
    inputs = StepInputs(
        token_ids=tokens,
        positions=positions,
        kv_slots=places * size + positions % size,
        num_decodes=len(rows),
        decode_slots=slots,
        decode_lengths=positions + 1,
        decode_positions=positions,
        decode_version=version,
        decode_table=table,
        is_sorted=False,
        prefill_slots=[],
        prefill_starts=[],
        prefill_counts=[],
        prefill_first=[],
        prefill_tables=[],
        result_slots=slots,
        result_tokens=ends - 1,
        forks=[],
        rows_version=0,
    )
    return inputs, ends - 1
