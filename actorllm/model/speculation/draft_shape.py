"""What a draft model is: its configuration beside the target's, and its shape."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from actorllm.config import ModelConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.registry import decoder_config
from actorllm.types.model_files import read_model_config
from actorllm.types.weight_version import FIRST_WEIGHTS


def model_in(target: ModelConfig, folder: str) -> ModelConfig:
    """Of a model in a folder of its own. An update of the target's weights is none of that model's."""
    return replace(
        target, name=folder, path=folder, weights=FIRST_WEIGHTS, overrides={}, quantization=None, module=None
    )


def draft_config(target: ModelConfig, folder: str, switches: Set[str]) -> tuple[ModelConfig, DecoderConfig]:
    """The draft model as an engine of its own would have it, and its shape.

    switches: of the backend's forward (`DecoderConfig.switches`). Raises ModelError.
    """
    tree = read_model_config(Path(folder))
    names = tree.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else repr(names)
    try:
        shape = decoder_config(architecture, tree)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"speculative_config: model={folder!r}: {error}") from error
    # A drafting model has a cache of keys and values, and no other.
    if unknown := sorted(shape.switches - (switches - {"latent", "recurrent"})):
        raise UnsupportedModelError(
            f"speculative_config: model={folder!r} needs {', '.join(unknown)}, which draft models must do without"
        )
    return replace(model_in(target, folder), architecture=architecture), shape
