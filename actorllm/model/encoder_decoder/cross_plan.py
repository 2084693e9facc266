"""`EncoderDecoderPlan`: what config.json says of a model with an encoder and a decoder, and how it is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from actorllm.config import ModelConfig
from actorllm.errors import CorruptModelError
from actorllm.model.hf.loading import check_release, read_config

CLASSES: dict[str, Any] = {"text": AutoModelForSeq2SeqLM, "audio": AutoModelForSpeechSeq2Seq}  # these are not typed
"""What makes the modules, by what the encoder takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderPlan:
    """The shape of the decoder; the fields that `DecoderConfig` has too mean the same."""

    config: Any
    """The transformers configuration."""
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_plan(model: ModelConfig, hf: dict[str, Any]) -> EncoderDecoderPlan:
    """Of the model of this config.json. Raises UnsupportedModelError with the reason, or CorruptModelError."""
    check_release(model.architecture)
    config = read_config(model, hf)
    try:
        heads = int(getattr(config, "decoder_attention_heads", None) or config.num_heads)
        layers = int(getattr(config, "num_decoder_layers", None) or config.decoder_layers)
        width = int(config.d_model)
        dim = int(getattr(config, "d_kv", None) or width // heads)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise CorruptModelError(
            f"{model.path}/config.json: {model.architecture} cannot be built: its decoder has no shape ({error})"
        ) from error
    return EncoderDecoderPlan(
        config=config,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
    )
