"""Updates of the weights on the emulated device: recorded steps go on in the same memory, with the new numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm import LLM
from actorllm.actors.worker import WorkerActor
from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.cuda.weight_copies import pairs
from actorllm.types.weight_version import WeightSource
from tests.model.cuda.host_engine import ARGUMENTS, generate, load
from tests.model.cuda.mixtures import QWEN3
from tests.model.cuda.saved_models import saved

FILES = {name: value for name, value in ARGUMENTS.items() if name != "load_format"}


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True}, {}),
        ({}, {"quantization": "int8"}),
        (QWEN3, {}),
    ],
    ids=["dense", "tied", "int8", "experts"],
)
def test_streams_after_an_update_are_those_of_a_fresh_engine(
    shape: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerActor, "_load", load)
    one, two = (saved(tmp_path / str(seed), seed, **shape) for seed in (1, 2))
    with LLM(str(two), **FILES, **arguments) as fresh:
        wanted = generate(fresh)
    with LLM(str(one), **FILES, **arguments) as llm:
        before = generate(llm)
        assert before != wanted
        llm.update_weights_from_disk(two)
        assert generate(llm) == wanted
        with pytest.raises(CorruptModelError, match="has shape"):
            llm.update_weights_from_tensors({"model.norm.weight": torch.ones(3)})
        assert generate(llm) == wanted
        llm.update_weights_from_disk(one)
        assert generate(llm) == before


def test_no_tensor_has_another_address(tmp_path: Path, make_runner: Callable[..., CudaRunner]) -> None:
    one, two = (saved(tmp_path / str(seed), seed) for seed in (1, 2))
    runner, other = (make_runner(path, load_format="auto") for path in (one, two))
    before = [held.data_ptr() for held, _ in pairs(runner.model, runner.model)]
    runner.commit_weights(runner.stage_weights(WeightSource("two", "x", str(two))))
    assert [held.data_ptr() for held, _ in pairs(runner.model, runner.model)] == before
    assert all(torch.equal(held, new) for held, new in pairs(runner.model, other.model))
    with pytest.raises(UnsupportedModelError, match="cannot take the place"):
        list(pairs(runner.model, None))


def test_what_is_not_updated_yet_is_named(tmp_path: Path, make_runner: Callable[..., CudaRunner]) -> None:
    path = saved(tmp_path / "one", 1)
    runner = make_runner(path, load_format="auto", enable_lora=True)
    with pytest.raises(UnsupportedModelError, match="on CUDA with enable_lora=True yet"):
        runner.stage_weights(WeightSource("two", "x", str(path)))


def test_an_extension_of_the_worker_gives_weights_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerActor, "_load", load)
    one, two = (saved(tmp_path / str(seed), seed) for seed in (1, 2))
    with LLM(str(two), **FILES) as fresh:
        wanted = generate(fresh)
    with LLM(str(one), worker_extension_cls="tests.api.worker_functions:WeightExtension", **FILES) as llm:
        for _ in range(2):
            llm.collective_rpc("update_weights_from_path", args=(str(two / "model.safetensors"),))
            assert generate(llm) == wanted
        assert llm.weight_version == "2"
