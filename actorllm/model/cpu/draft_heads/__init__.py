"""Models that draft for a target on the CPU: which one a configuration asks for, and heads that read the target's states."""

from __future__ import annotations

import torch

from actorllm.config import EngineConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu.draft_heads.drafter import HeadDrafter
from actorllm.model.cpu.draft_model import DraftModel
from actorllm.model.cpu.draft_passes import DraftingModel
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.registry import Plan
from actorllm.model.speculation.head_shape import read_head
from actorllm.types.speculation import DRAFT_MODEL, NGRAM, SUFFIX, WITH_MODEL


def drafting_model(config: EngineConfig, target: Plan, dtype: torch.dtype) -> DraftingModel | None:
    """The one that the configuration names; None: the drafter is no model. Raises ModelError."""
    assert config.speculation is not None
    if config.speculation.method not in WITH_MODEL:
        return None
    if not isinstance(target, DecoderConfig):
        raise UnsupportedModelError(
            f"speculative_config (method={config.speculation.method!r}) is not supported for {config.model.architecture} yet, "
            f"which runs through transformers; use {NGRAM!r} or {SUFFIX!r}"
        )
    if config.speculation.method == DRAFT_MODEL:
        return DraftModel(config, dtype)
    return HeadDrafter(config, read_head(config, target), target, dtype)
