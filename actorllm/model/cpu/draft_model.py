"""`DraftModel`: a second, smaller model in the worker, which drafts for the first (`speculative_config`, method "draft_model").

It has a KV cache of its own under the block tables of the target. Prefix sharing, forks, copies and preemption therefore need no
second bookkeeping. Prompts go through both models. Decoded tokens go through the draft model when it drafts next: a row
that drafts nothing costs it nothing. A draft is drawn with the noise of the target's token at its position, and by the same
rules. Two similar distributions therefore mostly give the same token.

Invariant: the cache is right up to `computed` for every slot, unless a block was published by a row that drafted nothing. What
is wrong there changes how many drafts are right, and no token. Owned by the runner, called between its steps.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.config import EngineConfig, ModelConfig
from actorllm.errors import ModelError, UnsupportedModelError
from actorllm.messages import I32, StepPlan
from actorllm.model.cpu.attention import KVCache
from actorllm.model.cpu.decoder import SWITCHES, Decoder
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.inputs import PADDING, PersistentBatch, StepInputs, padded
from actorllm.model.quantization import open_weights
from actorllm.model.registry import decoder_config
from actorllm.model.sampler import Sampler, SamplingColumns
from actorllm.model.speculation.histories import Histories
from actorllm.types.model_files import read_object

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]

LONGEST_RUN = 4
"""Tokens that a row may lag behind and still draft in one pass; a longer lag is worked off as a prompt is."""

CATCH_UP_TOKENS = 256
"""Tokens of a step that rows which lag behind are brought forward by; others wait for the next step, without drafts."""

MAX_LOGITS_BYTES = 32 << 20
"""float32 logits of one pass; rows beyond them draft nothing."""


class DraftModel:
    """See the module docstring.

    Arguments:
        config: of the engine; its `speculation` names the folder of this model.
        dtype: of the target, which this model is computed in, too.

    Raises UnsupportedModelError for a model that has no fused forward here.
    """

    def __init__(self, config: EngineConfig, dtype: torch.dtype) -> None:
        assert config.speculation is not None
        assert config.speculation.model is not None
        self._config, self._dtype = config, dtype
        self._model, self.shape = draft_config(config.model, config.speculation.model)
        self._is_greedy = config.speculation.draft_sample_method == "greedy"
        self._sampler = Sampler(self.shape.vocab_size)
        self._decoder: Decoder
        self.cache: KVCache
        self.computed: NDArray[np.int32] = np.zeros(0, np.int32)
        """By slot, how many tokens have their keys and values in the cache."""
        self._drafted: NDArray[np.int32] = np.zeros(0, np.int32)
        """By slot, how many drafts of the last step have them, too."""
        self._version = 0
        self.num_failures = 0
        """Passes whose states were not finite."""

    # Before the first step --------------------------------------------------------------------------------------------

    def load(self, show_progress: bool | None) -> None:
        """Read the weights, or draw them. Raises ModelError."""
        try:
            with open_weights(self._model, self._dtype, show_progress) as weights:
                self._decoder = Decoder(self.shape, weights, self._model.max_model_len)
        except ModelError as error:
            raise type(error)(f"speculative_config: the draft model: {error}") from error

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block over all layers."""
        size = self._config.cache.block_size * self._dtype.itemsize
        return 2 * self.shape.num_layers * self._decoder.num_kv_heads * self.shape.head_dim * size

    def allocate(self, num_blocks: int) -> None:
        """A cache with as many blocks as the target's; pages are mapped when they are first written."""
        shape, size = self.shape, self._config.cache.block_size
        self.cache = KVCache(
            shape.num_layers, self._decoder.num_kv_heads, shape.head_dim, num_blocks, size, self._dtype
        )
        self.computed = self._drafted = np.zeros(0, np.int32)

    # Steps ------------------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, num_slots: int) -> None:
        """New slots: what of them is in the cache already was computed by an earlier request."""
        if self.computed.size < num_slots:
            grown = np.zeros((2, num_slots), np.int32)
            grown[0, : self.computed.size], grown[1, : self._drafted.size] = self.computed, self._drafted
            self.computed, self._drafted = grown
        if plan.new_rows.size:
            self.computed[plan.new["slot"]] = plan.new["num_computed"]
            self._drafted[plan.new["slot"]] = 0

    def prefill(self, inputs: StepInputs) -> None:
        """The prompts of a step of the target."""
        first = inputs.num_decodes
        self._forward(
            replace(
                inputs,
                token_ids=inputs.token_ids[first:],
                positions=inputs.positions[first:],
                kv_slots=inputs.kv_slots[first:],
                num_decodes=0,
                prefill_starts=[start - first for start in inputs.prefill_starts],
                embedded=None,
                adapter_ids=None,
            )
        )
        columns = zip(inputs.prefill_slots, inputs.prefill_first, inputs.prefill_counts, strict=True)
        for slot, start, count in columns:
            if self.computed[slot] == start:
                self.computed[slot] = start + count
        for slot, source in inputs.forks:
            self.computed[slot] = self.computed[source]

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        """What became of the drafts of a step, by row. The last draft of a row has not been through this model."""
        kept = np.minimum(num_accepted, self._drafted[slots])
        self.computed[slots] += np.where(num_drafted > 0, kept, 0)
        self._drafted[slots] = 0

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        """The drafts of decode rows.

        Arguments:
            batch: of the target.
            slots: of the rows, [num_rows].
            wanted: how many drafts each is to have, [num_rows], at least 1.
        """
        found: list[list[int]] = [[] for _ in slots]
        most_rows = max(1, MAX_LOGITS_BYTES // (4 * self.shape.vocab_size))
        rows = self._caught_up(batch, histories, slots)[:most_rows]
        if not rows.size:
            return found
        # The first pass has what is known and not computed yet, the last token included; each later pass one draft.
        known = batch.columns.num_known[slots[rows]].astype(np.int64)
        starts = self.computed[slots[rows]].astype(np.int64)
        tokens = np.concatenate(
            [newest(histories, int(slots[row]), int(n - s)) for row, n, s in zip(rows, known, starts, strict=True)]
        )
        counts = known - starts
        self.computed[slots[rows]] = known
        self._drafted[slots] = 0
        columns: SamplingColumns | None = None
        position = 0
        self._version += 1
        while True:
            here = slots[rows]
            inputs, last = self._decode_inputs(batch, here, starts, counts, tokens)
            states = self._forward(inputs)
            if states is None:
                break
            logits = self._decoder.logits(self._decoder.select(states, last))
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
            starts, counts = (starts + counts)[goes_on], np.ones(len(rows), np.int64)
            self._drafted[slots[rows]] += 1
        return found

    def try_pass(self, batch: PersistentBatch, slots: I32) -> None:
        """One pass over these rows as it is made for a draft, of which nothing is used: it shows what a draft costs."""
        self._version += 1
        starts = batch.columns.num_computed[slots].astype(np.int64)
        tokens = batch.columns.last_token[slots].astype(np.int64)
        inputs, last = self._decode_inputs(batch, slots, starts, np.ones(len(slots), np.int64), tokens)
        states = self._forward(inputs)
        if states is not None:
            self._sampler.sample(self._decoder.logits(self._decoder.select(states, last)), self._columns(batch, slots))

    def _columns(self, batch: PersistentBatch, slots: I32) -> SamplingColumns:
        if self._is_greedy:
            return SamplingColumns.greedy(len(slots))
        of = batch.columns
        return SamplingColumns(
            temperature=of.temperature[slots],
            top_k=of.top_k[slots],
            top_p=of.top_p[slots],
            min_p=of.min_p[slots],
            seeds=of.seeds[slots],
            sample_index=of.sample_index[slots],
            token_index=of.num_outputs[slots],
        )

    def _caught_up(self, batch: PersistentBatch, histories: Histories, slots: I32) -> NDArray[np.intp]:
        """Which of the rows lag so little that they can draft, once some that lag more have been brought forward."""
        lags = batch.columns.num_known[slots] - self.computed[slots]
        room = CATCH_UP_TOKENS
        for row in np.flatnonzero(lags > LONGEST_RUN).tolist():
            slot = int(slots[row])
            history = histories.of(slot)
            count = min(room, int(lags[row]) - 1)  # the newest token is left for the pass that drafts
            if not count or history is None or history.tokens.size < lags[row]:
                continue
            first = int(self.computed[slot])
            tokens = newest(histories, slot, int(lags[row]))[:count]
            if self._forward(self._prompt_inputs(batch, slot, first, tokens)) is None:
                break
            self.computed[slot] += count
            lags[row] -= count
            room -= count
        return np.flatnonzero((lags > 0) & (lags <= LONGEST_RUN))

    def _forward(self, inputs: StepInputs) -> torch.Tensor | None:
        """The hidden states of all tokens; None: some are not finite, and what was stored is cleared."""
        states = self._decoder.forward(inputs, self.cache)
        if torch.isfinite(states.sum(1, dtype=torch.float32)).all():
            return states
        self.cache.clear(inputs, np.arange(len(inputs.token_ids)))
        self.num_failures += 1
        if self.num_failures == 1:
            logger.warning("the draft model's states are not finite; such rows are computed without drafts")
        return None

    # Inputs -----------------------------------------------------------------------------------------------------------

    def _decode_inputs(
        self, batch: PersistentBatch, slots: I32, starts: I64, counts: I64, tokens: I64
    ) -> tuple[StepInputs, I64]:
        """Some consecutive tokens of each slot, each a decode row of its own; and which are the last ones."""
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
            decode_version=self._version,
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

    @staticmethod
    def _prompt_inputs(batch: PersistentBatch, slot: int, first: int, tokens: I64) -> StepInputs:
        """Some consecutive tokens of one slot, as of a prompt."""
        size, count = batch.block_size, len(tokens)
        none: NDArray[np.int32] = np.zeros(0, np.int32)
        table = batch.block_tables[0][slot]
        positions = np.arange(first, first + count)
        return StepInputs(
            token_ids=tokens,
            positions=positions,
            kv_slots=table[positions // size].astype(np.int64) * size + positions % size,
            num_decodes=0,
            decode_slots=none,
            decode_lengths=none.astype(np.int64),
            decode_positions=none.astype(np.int64),
            decode_version=0,
            decode_table=none.reshape(0, 0),
            is_sorted=False,
            prefill_slots=[slot],
            prefill_starts=[0],
            prefill_counts=[count],
            prefill_first=[first],
            prefill_tables=[table.copy()],
            result_slots=none,
            result_tokens=none.astype(np.int64),
            forks=[],
            rows_version=0,
        )


def newest(histories: Histories, slot: int, count: int) -> I64:
    """The newest tokens of a slot. A position whose prompt is an embedding has some token in its place."""
    history = histories.of(slot)
    assert history is not None
    tokens = history.tokens
    return np.maximum(tokens[tokens.size - count :], 0).astype(np.int64)


def draft_config(target: ModelConfig, folder: str) -> tuple[ModelConfig, DecoderConfig]:
    """The draft model as an engine of its own would have it, and its shape. Raises ModelError."""
    tree = read_object(Path(folder) / "config.json")
    names = tree.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else repr(names)
    try:
        shape = decoder_config(architecture, tree)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"speculative_config: model={folder!r}: {error}") from error
    if unknown := sorted(shape.switches - (SWITCHES - {"latent"})):
        raise UnsupportedModelError(
            f"speculative_config: model={folder!r} needs {', '.join(unknown)}, which draft models must do without"
        )
    model = replace(
        target, name=folder, path=folder, architecture=architecture, overrides={}, quantization=None, module=None
    )
    return model, shape
