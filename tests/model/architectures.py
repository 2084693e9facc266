"""The table of architectures that were tried (`architectures.json`), from which docs/models.md is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers


def table(kind: str) -> list[Any]:
    """kind: "fused", "transformers", "media", "encoder-decoder", "encoders" or "refused"."""
    found: list[Any] = json.loads(Path(__file__).with_suffix(".json").read_text())[kind]
    return found


def architecture_of(family: str) -> str:
    """The architecture that a configuration class of transformers, such as "Llama", is written for."""
    config = getattr(transformers, f"{family}Config")
    names: dict[str, str] = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return names[config.model_type]
