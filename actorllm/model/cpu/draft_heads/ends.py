"""`Ends`: what a head that drafts shares with its target: the embedding, the final norm and the logits.

They are the target's own, except with several ranks. There each rank has its part of the vocabulary, and the head runs on the first
rank alone. That rank then has the embedding and the head of the target as a whole, too (`WholeEnds`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from actorllm.config import ModelConfig
from actorllm.model.cpu.decoder import Decoder, finished_logits
from actorllm.model.cpu.layers import RMSNorm, linear
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.families.tensors import DecoderTensors
from actorllm.model.linear import Form
from actorllm.model.parallel import Ranks
from actorllm.model.quantization import form_of, open_weights
from actorllm.model.weights import Weights


class Ends(Protocol):
    """A `Decoder` is one."""

    config: DecoderConfig
    embedding: torch.Tensor
    """Of all ids, before it is scaled."""

    @property
    def norm(self) -> RMSNorm | None:
        """The final one."""

    @property
    def tapped(self) -> dict[int, torch.Tensor]:
        """States of the step that was computed last, by layer; the caller takes them out."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] of final states."""


class WholeEnds:
    """Those of a target whose vocabulary is shared out among ranks.

    Arguments:
        target: this rank's part, whose norm and states they are.
        weights: of the target. Some of them are taken.
        form: of its linear layers.
    """

    def __init__(self, target: Decoder, weights: Weights, form: Form) -> None:
        self._target = target
        self.config = target.config
        tensors = DecoderTensors(target.config, weights, Ranks(), form)
        self.embedding = weights.own(tensors.embedding())
        self._embedding_scale = tensors.embedding_scale
        self._lm_head = linear(tensors.head() or form.head_of(self.embedding))

    @property
    def norm(self) -> RMSNorm | None:
        return self._target.norm

    @property
    def tapped(self) -> dict[int, torch.Tensor]:
        return self._target.tapped

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = torch.embedding(self.embedding, token_ids)
        return rows if self._embedding_scale == 1 else rows.mul_(self._embedding_scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return finished_logits(self.config, self._lm_head(hidden)).float()


def ends_of(target: Decoder, model: ModelConfig, show_progress: bool | None) -> Ends:
    """model: of the target, with the version of its weights that `target` has. Raises ModelError."""
    if target.ranks.size == 1:
        return target
    with open_weights(model, target.dtype, show_progress) as weights:
        return WholeEnds(target, weights, form_of(model))
