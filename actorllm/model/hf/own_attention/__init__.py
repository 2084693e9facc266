"""Models of transformers whose layers attend by code of their own: their attention is exchanged for one that asks for ours.

transformers lets an attention be chosen by name, but not in these architectures. Each has a module here, with a subclass of its
attention (`exchanged.ExchangedAttention`) that hands queries, keys and values on. `exchange` makes the layers of a model objects of
that class, and `choose` says what they call. What transformers itself computes stays within reach, for the check of the logits.
Called by `transformers_backend` and `encoder`. A new architecture is an entry and a module.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from transformers import AttentionMaskInterface

from actorllm.model.hf.own_attention.exchanged import AttentionFunction, ExchangedAttention

ARCHITECTURES = {
    "BloomForCausalLM": "bloom",
    "FalconForCausalLM": "falcon",
    "GPTNeoForCausalLM": "gpt_neo",
    "MptForCausalLM": "mpt",
    "OpenAIGPTLMHeadModel": "openai_gpt",
}
"""The module of each in this folder."""

ENCODERS = {"mpnet": "mpnet"}
"""The same of encoders, by their model_type: one has several architectures."""

NO_MASK = "actorllm_own"
"""The name of the attention of a model meanwhile, for which masks are empty: some of these models read them."""


def exchange(model: torch.nn.Module, kind_of: str, max_positions: int) -> None:
    """In place. kind_of: an architecture, or the model_type of an encoder. max_positions: how long a sequence may get."""
    module = importlib.import_module(f"{__name__}.{(ARCHITECTURES | ENCODERS)[kind_of]}")
    kind: type[ExchangedAttention] = module.ATTENTION
    scores = kind.scores_by_position(model.config, max_positions)
    for part in model.modules():
        if isinstance(part, kind.exchanges):
            layer: Any = part
            layer.__class__ = kind  # the same module, with another forward
            layer.begin(scores)
        kind.prepare(part)


def choose(model: Any, attention: AttentionFunction | None) -> None:
    """attention: what exchanged layers call; None: they attend as transformers does."""
    layers = [part for part in model.modules() if isinstance(part, ExchangedAttention)]
    for layer in layers:
        layer.attention = attention
    model.config._attn_implementation = NO_MASK if attention is not None else layers[0].own_name(model.config)


def _no_mask(**_: Any) -> torch.Tensor:
    return torch.empty(0)


AttentionMaskInterface.register(NO_MASK, _no_mask)
