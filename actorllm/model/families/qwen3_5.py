"""Qwen3.5 (dense), its text alone: the layers of Qwen3-Next, with one MLP each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.model.families import qwen3_next
from actorllm.model.families.decoder_config import DecoderConfig, TensorNames


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    hf, names = text_of(hf)
    return qwen3_next.hybrid(qwen3_next.DEFAULTS | hf, names, None, is_split=True)


def text_of(hf: Mapping[str, Any]) -> tuple[dict[str, Any], TensorNames]:
    """The part of a config.json that is of text, and what its tensors are called."""
    text = hf.get("text_config")
    names = TensorNames(norm_offset=1.0, beside=("mtp.",))
    if isinstance(text, Mapping):  # beside the tower for images, without which positions have one axis
        names = TensorNames(model="model.language_model", norm_offset=1.0, beside=("mtp.", "model.visual."))
        hf = {**hf, **text, "tie_word_embeddings": hf.get("tie_word_embeddings", text.get("tie_word_embeddings"))}
    return dict(hf), names
