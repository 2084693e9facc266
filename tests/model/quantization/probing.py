"""Logits of a loaded runner, and how far they are from others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from actorllm.model.hf import probe

TEXT = (
    "There was once a miller who had nothing left but his mill and an old grey cat. When the autumn came he said to his daughter "
    "that they must leave before the snow, and take the road along the river to the town where her uncle sold cloth. She packed "
    "bread and cheese in a basket, and the cat walked in front of them as if it knew the way."
)
"""Held out: it was written for these tests."""


def logits(runner: Any, ids: list[int] | None = None) -> torch.Tensor:
    """Of all positions of a prompt, float32 [num_tokens, vocab_size]; None: of 40 random ids."""
    tokens = np.random.default_rng(0).integers(0, 97, 40) if ids is None else np.array(ids)
    blocks: Any = SimpleNamespace(probed_block_size=runner.config.cache.block_size)
    with torch.inference_mode():
        chunk = probe.step_inputs(blocks, None, [(tokens, 0, np.arange(40, dtype=np.int32))])
        hidden = runner.decoder.forward(chunk, runner.cache)
        made: torch.Tensor = runner.decoder.logits(runner.decoder.select(hidden, np.arange(len(tokens)))).clone()
    return made


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the difference of a position's logits, in their standard deviations; the mean of positions."""
    return float(((found - expected).square().mean(1).sqrt() / expected.std(1)).mean())
