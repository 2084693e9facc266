"""`DraftModel`: a second, smaller model in the worker, which drafts for the first (`speculative_config`, method "draft_model").

Prefix sharing, forks, copies and preemption need no second bookkeeping, as the block tables are those of the target. Prompts go
through both models. Decoded tokens go through the draft model when it drafts next: a row that drafts nothing costs it
nothing. Two similar distributions mostly give the same token.

Invariant: the cache is right up to `computed` for every slot, unless a block was published by a row that drafted nothing.
"""

from __future__ import annotations

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
from actorllm.model.cpu.draft_passes import I64, DraftingModel, model_in, newest
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.inputs import PersistentBatch, StepInputs
from actorllm.model.quantization import open_weights
from actorllm.model.registry import decoder_config
from actorllm.model.speculation.histories import Histories
from actorllm.types.model_files import read_model_config

LONGEST_RUN = 4
"""Tokens that a row may lag behind and still draft in one pass; a longer lag is worked off as a prompt is."""

CATCH_UP_TOKENS = 256
"""Tokens of a step that rows which lag behind are brought forward by; others wait for the next step, without drafts."""


class DraftModel(DraftingModel):
    """See the module docstring.

    Arguments:
        config: of the engine; its `speculation` names the folder of this model.
        dtype: of the target, which this model is computed in, too.

    Raises UnsupportedModelError for a model that has no fused forward here.
    """

    def __init__(self, config: EngineConfig, dtype: torch.dtype) -> None:
        assert config.speculation is not None
        assert config.speculation.model is not None
        self._model, self.shape = draft_config(config.model, config.speculation.model)
        super().__init__(config, self.shape.vocab_size)
        self._dtype = dtype
        self._decoder: Decoder
        self._drafted: NDArray[np.int32] = np.zeros(0, np.int32)
        """By slot, how many drafts of the last step have their keys and values in the cache, too."""

    # Before the first step --------------------------------------------------------------------------------------------

    def load(self, target: Decoder, show_progress: bool | None) -> None:
        try:
            with open_weights(self._model, self._dtype, show_progress) as weights:
                self._decoder = Decoder(self.shape, weights, self._model.max_model_len)
        except ModelError as error:
            raise type(error)(f"speculative_config: the draft model: {error}") from error

    @property
    def block_bytes(self) -> int:
        size = self._config.cache.block_size * self._dtype.itemsize
        return 2 * self.shape.num_layers * self._decoder.num_kv_heads * self.shape.head_dim * size

    def allocate(self, num_blocks: int) -> None:
        shape, size = self.shape, self._config.cache.block_size
        self.cache = KVCache(
            shape.num_layers, self._decoder.num_kv_heads, shape.head_dim, num_blocks, size, self._dtype
        )
        self.computed = self._drafted = np.zeros(0, np.int32)

    # Steps ------------------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, batch: PersistentBatch) -> None:
        if self.computed.size < batch.num_slots:
            grown = np.zeros((2, batch.num_slots), np.int32)
            grown[0, : self.computed.size], grown[1, : self._drafted.size] = self.computed, self._drafted
            self.computed, self._drafted = grown
        if plan.new_rows.size:
            self.computed[plan.new["slot"]] = plan.new["num_computed"]
            self._drafted[plan.new["slot"]] = 0

    def follow(self, inputs: StepInputs, states: torch.Tensor) -> None:
        if not inputs.prefill_slots:
            return
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

    def _ready(self, batch: PersistentBatch, histories: Histories, slots: I32) -> NDArray[np.intp]:
        """Those that lag little, once some that lag more have been brought forward."""
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

    def _begin(self, slots: I32, counts: I64) -> None:
        self._drafted[slots] = 0

    def _drafts_stored(self, slots: I32) -> None:
        self._drafted[slots] += 1

    def _compute(
        self, inputs: StepInputs, last: I64, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        states = self._forward(inputs)
        if states is None:
            return None
        chosen = self._decoder.select(states, last)
        return self._decoder.logits(chosen), chosen

    def _forward(self, inputs: StepInputs) -> torch.Tensor | None:
        """The hidden states of all tokens; None: some are not finite, and what was stored is cleared."""
        states = self._decoder.forward(inputs, self.cache)
        return states if self._finite(inputs, states) else None

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


def draft_config(target: ModelConfig, folder: str) -> tuple[ModelConfig, DecoderConfig]:
    """The draft model as an engine of its own would have it, and its shape. Raises ModelError."""
    tree = read_model_config(Path(folder))
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
    return replace(model_in(target, folder), architecture=architecture), shape
