"""Fixtures of the model tests: tiny models, loaded runners, drivers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorllm.config import EngineConfig
from actorllm.model.cpu.runner import CpuRunner
from tests.model.driver import TINY_LLAMA, Driver

BLOCK_SIZE = 4


@pytest.fixture
def make_runner() -> Callable[..., CpuRunner]:
    """A loaded runner with a cache of 64 blocks over a model's folder."""

    def make(folder: Path | str, **arguments: Any) -> CpuRunner:
        config = EngineConfig.from_arguments(
            folder,
            **({"block_size": BLOCK_SIZE, "skip_tokenizer_init": True, "num_threads": 1} | arguments),
        )
        runner = CpuRunner(config, show_progress=False)
        runner.load()
        runner.allocate(64)
        return runner

    return make


@pytest.fixture
def make_driver(make_runner: Callable[..., CpuRunner]) -> Callable[..., Driver]:
    def make(folder: Path | str, seed: int = 0, **arguments: Any) -> Driver:
        return Driver(make_runner(folder, **arguments), seed=seed)

    return make


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """The folder of a tiny Llama without weights: for load_format='dummy'."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder
