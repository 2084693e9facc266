"""Adapters in models that run through transformers: logits against merged weights, and what cannot be adapted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from actorllm.errors import InvalidParameterError
from tests.model.adapters.adapted_models import adapted_driver, expected, last_logits, put
from tests.model.adapters.lora_folders import write_adapter
from tests.model.hf.decoders import TOLERANCE, prompt, save

LENGTH = 23


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Of all layers that multiply by a weight, but for the head."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Conv1D):
            found[name] = (layer.weight.shape[1], layer.weight.shape[0])
        elif type(layer) is torch.nn.Linear and layer is not model.get_output_embeddings():
            found[name] = tuple(layer.weight.shape)
    return found


def merged(model: Any, deltas: dict[str, torch.Tensor]) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, delta in deltas.items():
            layer = other.get_submodule(name)
            layer.weight.add_(delta.T if isinstance(layer, Conv1D) else delta)
    return other


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt-neox", "gemma2", "stablelm", "llama"])
def test_logits_are_those_of_merged_weights(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "base")
    driver = adapted_driver(tmp_path / "base", model_impl="transformers")
    layers = linear_shapes(model)
    deltas = {
        1: write_adapter(tmp_path / "1", layers, seed=1),
        3: write_adapter(tmp_path / "3", dict(list(layers.items())[1:3]), seed=2, r=8, use_rslora=True),
    }
    for slot in deltas:
        put(driver.runner, slot, tmp_path / str(slot))
    rows = {i: (prompt(i, LENGTH + i), adapter) for i, adapter in enumerate((1, 0, 3, 1))}
    logits = last_logits(driver, rows)
    for slot, (tokens, adapter) in rows.items():
        wanted = expected(merged(model, deltas[adapter]) if adapter else model, driver, slot, len(tokens))
        assert (logits[slot] - wanted).abs().max() < TOLERANCE, f"row {slot} with adapter {adapter}"
        if adapter:
            plain = expected(model, driver, slot, len(tokens))
            assert (logits[slot] - plain).abs().max() > 10 * TOLERANCE, "the adapter makes a difference"


@pytest.mark.parametrize(
    ("family", "model_impl"),
    [("qwen3-moe", "transformers"), ("qwen3-moe", "vllm"), ("mixtral", "vllm"), ("deepseek-v3", "transformers")],
)
def test_what_sees_a_choice_of_tokens_is_not_adapted(family: str, model_impl: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "base")
    driver = adapted_driver(tmp_path / "base", model_impl=model_impl)
    slots = driver.runner.adapters.slots
    assert any("self_attn" in name for name in slots.targets)
    assert not any(".experts." in name or name.endswith(".gate") for name in slots.targets)
    write_adapter(tmp_path / "1", {"model.layers.1.mlp.experts.0.up_proj": (32, 48)})
    with pytest.raises(InvalidParameterError, match="adapts nothing that can be adapted"):
        put(driver.runner, 1, tmp_path / "1")
    name = "model.layers.0.self_attn.o_proj"
    deltas = write_adapter(tmp_path / "2", {name: linear_shapes(model)[name]}, seed=1)
    put(driver.runner, 2, tmp_path / "2")
    tokens = prompt(1, LENGTH)
    logits = last_logits(driver, {0: (tokens, 2)})[0]
    assert (logits - expected(merged(model, deltas), driver, 0, LENGTH)).abs().max() < TOLERANCE


def test_other_weights_get_the_adapters(tmp_path: Path) -> None:
    """As an update of the weights and a sleep bring them."""
    model = save("gpt2", tmp_path / "base")
    driver = adapted_driver(tmp_path / "base", model_impl="transformers")
    runner = driver.runner
    deltas = write_adapter(tmp_path / "1", linear_shapes(model), seed=1)
    put(runner, 1, tmp_path / "1")
    source = runner.config.model.weights
    for releases in (False, True):
        if releases:
            runner.release_weights(source, keeps_pages=True)
        runner.commit_weights(runner.stage_weights(source))
        tokens = prompt(int(releases), LENGTH)
        logits = last_logits(driver, {releases: (tokens, 1)})[releases]
        wanted = expected(merged(model, deltas), driver, int(releases), LENGTH)
        assert (logits - wanted).abs().max() < TOLERANCE
