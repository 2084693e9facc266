"""Adapters in the fused forwards: logits against merged weights through transformers, rows beside each other, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm.errors import InvalidParameterError
from actorllm.types.adapter_folder import AdapterDigests
from tests.model.adapters.adapted_models import adapted_driver, expected, last_logits, put
from tests.model.adapters.lora_folders import adaptable, linear_layers, merged, shapes_of, write_adapter
from tests.model.hf.decoders import TOLERANCE, prompt, save

pytestmark = pytest.mark.usefixtures("computed_as_asked")

LENGTH = 23


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 8}),
        ("phi3", {}),
        ("olmo2", {}),
        ("gemma3", {}),
        ("mamba2", {}),
        ("mamba", {"tie_word_embeddings": False}),
        ("granite-hybrid", {"num_local_experts": 0}),
        ("falcon-h1", {}),
        ("qwen3-next", {"mlp_only_layers": [0, 1, 2, 3]}),
        ("qwen3.5", {}),
        ("recurrent-gemma", {}),
        ("lfm2", {}),
        ("jamba", {"num_experts": 1}),
        ("nemotron-h", {"layers_block_type": ["mlp", "linear_attention", "full_attention"], "num_hidden_layers": 3}),
    ],
)
def test_logits_are_those_of_merged_weights(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = save(family, tmp_path / "base", **more)
    driver = adapted_driver(tmp_path / "base")
    layers = adaptable(model)
    deltas = {
        1: write_adapter(tmp_path / "1", layers, seed=1),
        2: write_adapter(tmp_path / "2", layers, seed=2, r=8, use_rslora=True, rank_pattern={"o_proj": 3}),
        4: write_adapter(tmp_path / "4", dict(list(layers.items())[1:3]), seed=4, alpha_pattern={"q_proj": 1}),
    }
    for slot in deltas:
        put(driver.runner, slot, tmp_path / str(slot))
    rows = {i: (prompt(i, LENGTH + i), adapter) for i, adapter in enumerate((1, 0, 2, 1, 4, 0))}
    logits = last_logits(driver, rows)
    for slot, (tokens, adapter) in rows.items():
        model_of_row = merged(model, deltas[adapter]) if adapter else model
        wanted = expected(model_of_row, driver, slot, len(tokens))
        assert (logits[slot] - wanted).abs().max() < TOLERANCE, f"row {slot} with adapter {adapter}"
        if adapter:
            plain = expected(model, driver, slot, len(tokens))
            assert (logits[slot] - plain).abs().max() > 10 * TOLERANCE, "the adapter makes a difference"


def test_a_row_does_not_depend_on_the_adapters_of_others(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "base")
    layers = shapes_of(linear_layers(model))
    driver = adapted_driver(tmp_path / "base")
    huge = tmp_path / "huge"
    write_adapter(huge, layers, seed=9)
    tensors = load_file(huge / "adapter_model.safetensors")
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, huge / "adapter_model.safetensors")
    write_adapter(tmp_path / "1", layers, seed=1)
    put(driver.runner, 1, tmp_path / "1")
    put(driver.runner, 2, huge)
    tokens = prompt(3, LENGTH)
    alone = last_logits(driver, {0: (tokens, 1)})[0]
    driver.remove(0)
    logits = last_logits(driver, {1: (prompt(4, 30), 2), 2: (tokens, 1), 3: (prompt(5, 9), 0), 4: (tokens, 0)})
    assert (logits[2] - alone).abs().max() < TOLERANCE
    driver.remove(1, 2, 3, 4)
    assert (last_logits(driver, {5: (tokens, 0)})[5] - logits[4]).abs().max() < TOLERANCE


def test_a_slot_that_is_filled_anew_has_nothing_left_of_the_adapter_before(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "base")
    layers = shapes_of(linear_layers(model))
    driver = adapted_driver(tmp_path / "base")
    write_adapter(tmp_path / "whole", layers, seed=1, r=8)
    few = write_adapter(tmp_path / "few", dict(list(layers.items())[:2]), seed=2, r=2)
    put(driver.runner, 3, tmp_path / "whole")
    put(driver.runner, 3, tmp_path / "few")
    tokens = prompt(1, LENGTH)
    logits = last_logits(driver, {0: (tokens, 3)})[0]
    assert (logits - expected(merged(model, few), driver, 0, LENGTH)).abs().max() < TOLERANCE


@pytest.mark.parametrize("max_loras", [1, 4])
@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", None), ("float16", None), ("float32", "int8")])
@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_other_forms_of_the_base_are_adapted(
    model_impl: str, dtype: str, quantization: str | None, max_loras: int, tmp_path: Path
) -> None:
    """Their rounding moves logits by some percent; without its adapter a row differs by more than its size."""
    model = save("llama", tmp_path / "base")
    deltas = write_adapter(tmp_path / "1", shapes_of(linear_layers(model)), seed=1, size=1.0)
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "model_impl": model_impl}
    driver = adapted_driver(tmp_path / "base", max_loras=max_loras, **options)
    put(driver.runner, 1, tmp_path / "1")
    rows = {0: (prompt(0, LENGTH), 1), 1: (prompt(1, LENGTH), 0)}
    logits = last_logits(driver, rows)
    for slot, of_row in ((0, merged(model, deltas)), (1, model)):
        wanted = expected(of_row, driver, slot, LENGTH)
        assert (logits[slot] - wanted).norm() < 0.15 * wanted.norm()
    plain = expected(model, driver, 0, LENGTH)
    assert (logits[0] - plain).norm() > 0.5 * plain.norm()


def test_what_does_not_fit_the_model_is_refused_by_name(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "base")
    runner = adapted_driver(tmp_path / "base").runner
    layers = shapes_of(linear_layers(model))
    name = "model.layers.0.self_attn.q_proj"
    tensor = f"base_model.model.{name}.lora_A.weight"

    def refused(folder: Path, told: str) -> None:
        with pytest.raises(InvalidParameterError, match=told):
            put(runner, 1, folder)

    write_adapter(tmp_path / "wide", {name: (48, 64)})
    refused(tmp_path / "wide", rf"lora_A of {name} is .*\(4, 64\).*\(4, 48\)")
    write_adapter(tmp_path / "head", {"lm_head": (97, 48)})
    refused(tmp_path / "head", "lm_head.*adapts nothing")
    write_adapter(tmp_path / "deep", {"model.layers.7.self_attn.q_proj": (48, 48)})
    refused(tmp_path / "deep", r"layers\.7")
    write_adapter(tmp_path / "dora", layers, rename={tensor: f"base_model.model.{name}.lora_magnitude_vector"})
    refused(tmp_path / "dora", "lora_magnitude_vector")
    write_adapter(tmp_path / "half", {name: (48, 48)})
    tensors = load_file(tmp_path / "half" / "adapter_model.safetensors")
    save_file({tensor: tensors[tensor]}, tmp_path / "half" / "adapter_model.safetensors")
    refused(tmp_path / "half", f"lora_B of {name} is not there")
    save_file({n: t * float("inf") for n, t in tensors.items()}, tmp_path / "half" / "adapter_model.safetensors")
    refused(tmp_path / "half", "not finite")
    save_file(
        {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()}, tmp_path / "half" / "adapter_model.safetensors"
    )
    refused(tmp_path / "half", rf"lora_A of {name} is torch\.float8_e4m3fn .*must be floats of 16, 32 or 64 bits")
    twice = tensors | {n.replace("model.model.", "model."): t for n, t in tensors.items()}
    save_file({n: t.clone() for n, t in twice.items()}, tmp_path / "half" / "adapter_model.safetensors")
    refused(tmp_path / "half", "is there a second time")
    (tmp_path / "half" / "adapter_model.safetensors").write_bytes(b"\x10" + bytes(100))
    refused(tmp_path / "half", "is no safetensors file")
    (tmp_path / "half" / "adapter_model.safetensors").write_bytes(b"")
    refused(tmp_path / "half", "is no safetensors file")


def test_a_folder_that_is_changed_before_it_is_read_is_refused(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "base")
    runner = adapted_driver(tmp_path / "base").runner
    layers = shapes_of(linear_layers(model))
    write_adapter(tmp_path / "a", layers, seed=1)
    adapter = AdapterDigests(max_rank=8).adapter_of(str(tmp_path / "a"))
    write_adapter(tmp_path / "a", layers, seed=2)
    assert runner.adapters is not None
    with pytest.raises(InvalidParameterError, match="was changed since the request came"):
        runner.adapters.read(adapter)


@pytest.mark.parametrize("family", ["falcon-h1", "qwen3.5"])
def test_other_weights_of_recurrent_layers_get_the_adapters(family: str, tmp_path: Path) -> None:
    """As an update of the weights and a sleep bring them."""
    model = save(family, tmp_path / "base")
    driver = adapted_driver(tmp_path / "base")
    runner = driver.runner
    deltas = write_adapter(tmp_path / "1", adaptable(model), seed=1)
    put(runner, 1, tmp_path / "1")
    source = runner.config.model.weights
    for slot, releases in enumerate((False, True)):
        if releases:
            runner.release_weights(source, keeps_pages=True)
        runner.commit_weights(runner.stage_weights(source))
        logits = last_logits(driver, {slot: (prompt(slot, LENGTH), 1)})[slot]
        assert (logits - expected(merged(model, deltas), driver, slot, LENGTH)).abs().max() < TOLERANCE


def test_layers_are_found_by_their_place_whatever_class_was_trained(tmp_path: Path) -> None:
    """Names before the layers differ by the class, and patterns of ranks are of the names that the adapter has."""
    model = save("llama", tmp_path / "base")
    driver = adapted_driver(tmp_path / "base")
    name, tokens = "model.layers.1.self_attn.o_proj", prompt(1, LENGTH)
    for slot, other in enumerate(("model.language_model.layers.1", "language_model.model.layers.1", "layers.1")):
        adapted = other + ".self_attn.o_proj"
        deltas = write_adapter(tmp_path / str(slot), {adapted: (48, 48)}, seed=1, rank_pattern={adapted: 2})
        put(driver.runner, 1, tmp_path / str(slot))
        logits = last_logits(driver, {slot: (tokens, 1)})[slot]
        wanted = expected(merged(model, {name: deltas[adapted]}), driver, slot, LENGTH)
        assert (logits - wanted).abs().max() < TOLERANCE
    write_adapter(tmp_path / "tower", {"model.visual.layers.1.self_attn.o_proj": (48, 48)})
    with pytest.raises(InvalidParameterError, match=r"visual\.layers\.1.*adapts nothing"):
        put(driver.runner, 1, tmp_path / "tower")


def test_what_is_between_the_products_of_mamba_is_refused_by_name(tmp_path: Path) -> None:
    save("mamba", tmp_path / "base")
    runner = adapted_driver(tmp_path / "base").runner
    write_adapter(tmp_path / "1", {"backbone.layers.0.mixer.x_proj": (21, 96)})
    with pytest.raises(InvalidParameterError, match=r"mixer\.x_proj.* adapts nothing .*; adapt in_proj, out_proj"):
        put(runner, 1, tmp_path / "1")
