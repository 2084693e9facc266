"""The check of a model that takes more than text sees what is wrong with the rows of an item: controls that must fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model import embeds
from actorllm.model.cpu import attention
from actorllm.model.hf import media_probe, transformers_backend
from tests.media.small_models import SAVE, save_llava
from tests.model.families.loaded import cpu_driver

MODELS = SAVE | {"llava": save_llava}


def flat_positions(ids: Any) -> tuple[Any, int]:
    """The rows of a grid as if they were text."""
    return np.tile(np.arange(ids.size), (3, 1)), 0


def no_later_rows(*arguments: Any) -> list[torch.Tensor]:
    """What is added behind the first layers is lost."""
    return [torch.zeros_like(rows) for rows in later_rows(*arguments)]


def nothing_behind(is_whole: Any) -> Any:
    """A row of an image sees those before it only."""
    return np.zeros(is_whole.size, np.int64)


def turned_rows(embedded: torch.Tensor, inputs: Any) -> None:
    """The rows of a chunk in another order."""
    if inputs.embedded is not None:
        inputs.embeds = inputs.embeds.reshape(len(inputs.embedded), -1)[::-1].reshape(-1)
    place_rows(embedded, inputs)


later_rows, place_rows = embeds.later_rows, embeds.place_rows
SABOTAGE: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("qwen2_5_vl", media_probe, "grid_positions", flat_positions),
    ("qwen3_vl", media_probe, "grid_positions", flat_positions),
    ("qwen3_vl", transformers_backend, "later_rows", no_later_rows),
    ("gemma3", attention, "_behind_in_run", nothing_behind),
    *((name, transformers_backend, "place_rows", turned_rows) for name in ("llava", "smolvlm", "qwen2_audio")),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "module", "function", "wrong"), SABOTAGE, ids=[f"{name}, {function}" for name, _, function, _ in SABOTAGE]
)
def test_rows_that_are_computed_wrongly_are_seen(
    name: str,
    module: Any,
    function: str,
    wrong: Callable[..., Any],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = cpu_driver(MODELS[name](tmp_path), dtype=dtype)
    decoder, media = driver.runner.decoder, driver.runner.config.model.media
    assert media is not None
    media_probe.probe_media(decoder, media)  # type: ignore[arg-type]
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(UnsupportedModelError, match=f"behind rows of its {media.modality} the states differ"):
        media_probe.probe_media(decoder, media)  # type: ignore[arg-type]
