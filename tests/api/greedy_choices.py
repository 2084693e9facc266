"""Greedy streams are the choices of transformers, as far as its logits tell them apart."""

from __future__ import annotations

from typing import Any

from tests.model.hf.decoders import reference

MARGIN = 1e-4
"""Of logits: a choice that is nearer to the best one may be either."""


def check_choices(module: Any, prompts: list[Any], streams: list[list[int]]) -> None:
    """Each token of these greedy streams is what the module of transformers chooses after those before it."""
    for one, stream in zip(prompts, streams, strict=True):
        logits = reference(module, one["prompt_token_ids"] + stream)[-len(stream) - 1 : -1]
        chosen = logits.gather(1, logits.new_tensor([stream]).long().T)[:, 0]
        assert (chosen > logits.amax(1) - MARGIN).all()
