"""What tests must know of the installed release of transformers: the lowest that the project takes is 4.57."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from actorllm.model.hf.loading import LOWEST_RELEASE

INSTALLED = tuple(int(part) for part in transformers.__version__.split(".")[:2])

needs_modules = pytest.mark.skipif(
    INSTALLED < LOWEST_RELEASE,
    reason=f"transformers {transformers.__version__} is too old for models that run through it",
)
"""Of a test whose model has no fused forward, or is run once more without it."""


def config_values(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a config of transformers. Before release 5, `rope_parameters` were `rope_theta` and `rope_scaling`, and an
    unknown argument was kept and not used."""
    rope = values.get("rope_parameters")
    if rope is None or INSTALLED >= (5, 0):
        return values
    rest = {name: value for name, value in values.items() if name != "rope_parameters"}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return rest | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
