"""Heads of decoders that classify: one product or two, read from tensors named `score`, or made of rows of the head for text.

Rerankers that were trained to answer "yes" or "no" have no head for labels. The rows of these tokens are one, as vLLM's
`classifier_from_token` says. Called by the CPU runner; the heads of encoders are `hf.encoder`'s.
"""

from __future__ import annotations

import torch

from actorllm.config import ModelConfig
from actorllm.errors import CorruptModelError
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.weights import Weights
from actorllm.text.tokenizer import Tokenizer
from actorllm.types.pooling_head import Head


class LinearHead:
    """From pooled states to scores."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [num_labels, hidden_size]. bias: [num_labels]; None: zeros."""
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """states: float32 [num_states, hidden_size]. Returns float32 [num_states, num_labels]."""
        return torch.nn.functional.linear(states, self._weight, self._bias)


class LayeredHead:
    """The same with a layer between states and scores, as reward models have it."""

    def __init__(self, layer: LinearHead, scores: LinearHead) -> None:
        self._layer, self._scores = layer, scores

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """As `LinearHead`."""
        return self._scores(torch.relu(self._layer(states)))


def read_linear(head: Head, plan: DecoderConfig, model: ModelConfig, weights: Weights) -> LinearHead | LayeredHead:
    """Raises CorruptModelError for a checkpoint, or tokens, that are not of this head."""
    if head.has_layer:
        sizes = {0: plan.hidden_size, 2: head.size}  # between them is the ReLU
        layers = [
            LinearHead(
                weights.own(weights.take(f"score.{number}.weight", size, plan.hidden_size)),
                weights.take(f"score.{number}.bias", size),
            )
            for number, size in sizes.items()
        ]
        return LayeredHead(*layers)
    if not head.tokens:
        # In transformers the head for tokens has a bias, and the one for prompts has none.
        bias = weights.take("score.bias", head.size) if head.is_of_tokens else None
        return LinearHead(weights.own(weights.take("score.weight", head.size, plan.hidden_size)), bias)
    if model.tokenizer is None:
        raise CorruptModelError(
            f"classifier_from_token={list(head.tokens)} needs a tokenizer; leave skip_tokenizer_init out"
        )
    tokenizer = Tokenizer(model.tokenizer)
    ids = [tokenizer.backend.token_to_id(token) for token in head.tokens]
    for token, found in zip(head.tokens, ids, strict=True):
        if found is None or found >= plan.vocab_size:
            raise CorruptModelError(f"classifier_from_token: the vocabulary of {model.name!r} has no token {token!r}")
    names = plan.names
    name = f"{names.model}.{names.embedding}" if plan.ties_embeddings else names.head
    rows = [
        weights.take(f"{name}.weight", plan.vocab_size, plan.hidden_size, rows=slice(i, i + 1)).float() for i in ids
    ]
    return LinearHead(rows[1] - rows[0] if head.is_two_way else torch.cat(rows))
