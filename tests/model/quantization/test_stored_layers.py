"""Quantized checkpoints through transformers: the logits of the fused forwards, the codes of the files, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm.config import EngineConfig
from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.cpu.layers import PackedLinear
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.hf.packing import PackedModule
from actorllm.model.quantization.int4pack import Int4Linear
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import Int8Linear
from actorllm.types.weight_version import WeightSource
from tests.model.hf.decoders import save
from tests.model.hf.releases import needs_modules
from tests.model.quantization.layouts import WRITERS, save_both
from tests.model.quantization.probing import error, logits

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
from weights import W8A8

pytestmark = needs_modules

QUICK = ("gptq-desc_act", "packed-zeros", "fp8-block", "torchao-int8", "bnb-nf4")
"""One of each way to store codes."""


def kinds(runner: Any) -> dict[str, type]:
    """What computes each linear layer, by the name of its module."""
    named = runner.decoder.model.named_modules()
    return {name: type(module.product) for name, module in named if isinstance(module, PackedModule)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow(reason="the other ways to store codes"))
        for name in WRITERS
    ],
)
def test_logits_are_those_of_the_fused_forward(name: str, tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    """The same codes and scales, in the same arithmetic."""
    quantized, _ = save_both(name, tmp_path)
    given: dict[str, Any] = {"dtype": "float32", "quantization_twin": False}
    fused = make_runner(quantized, **given)
    ours = make_runner(quantized, **given, model_impl="transformers")
    assert error(logits(ours), logits(fused)) < 0.01
    wanted = {type(part) for layer in fused.decoder.layers for part in (layer.output, layer.down)}
    found = {kind for name, kind in kinds(ours).items() if name.endswith(("o_proj", "down_proj"))}
    assert found == wanted
    assert found <= {Int4Linear, Int8Linear}


def without_a_fused_forward(name: str, folder: Path, wanted: str = "layers.") -> Path:
    """A random model whose linear layers have codes of 8 bits, with scales that are not those of its largest weights."""
    save(name, folder)
    found: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        found[key] = tensor.clone()
        if wanted in key and key.endswith(".weight") and tensor.dim() == 2:
            scales = (tensor.abs().amax(1, keepdim=True) / 100).bfloat16()
            found[key] = (tensor / scales.float()).round().to(torch.int8)
            found[f"{key}_scale"] = scales
    save_file(found, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}))
    return folder


def test_layers_have_the_codes_of_the_files(tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    """Of a model that has biases and no fused forward, bit by bit; the head, which is left out, is dense."""
    runner = make_runner(without_a_fused_forward("starcoder2", tmp_path), dtype="float32")
    tensors, num_layers = load_file(tmp_path / "model.safetensors"), 0
    for name, module in runner.decoder.model.named_modules():
        if not isinstance(module, PackedModule) or f"{name}.weight_scale" not in tensors:
            continue
        scales = tensors[f"{name}.weight_scale"][:, 0].float()
        exact = Int8(tensors[f"{name}.weight"], scales, tensors[f"{name}.bias"])
        x = torch.randn(3, module.in_features)
        assert torch.equal(module(x), exact(x))
        num_layers += 1
    assert num_layers == 12
    assert kinds(runner)["lm_head"] is PackedLinear


def test_quantized_tensors_of_no_linear_layer_are_refused(tmp_path: Path) -> None:
    """Experts of transformers are no layers of their own."""
    folder = without_a_fused_forward("mixtral", tmp_path, wanted="experts")
    config = EngineConfig.from_arguments(folder, model_impl="transformers", skip_tokenizer_init=True)
    told = r"tensor '.*experts.*' is I8, and MixtralForCausalLM of transformers has no plain linear layer '.*experts"
    with pytest.raises(UnsupportedModelError, match=told):
        CpuRunner(config, show_progress=False).load()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda y, name: y.pop(f"{name}.weight_scale"), "has no tensor '{}.weight_scale'"),
        (lambda y, name: y.update({f"{name}.weight": torch.ones(48, 48)}), "has a tensor '{}.weight_scale'"),
        (lambda y, name: y.update({f"{name}.weight_zero_point": torch.ones(48, 1)}), "'{}.weight_zero_point'"),
    ],
    ids=["no scales", "floats", "zero points"],
)
def test_a_corrupt_checkpoint_is_refused_by_the_name_of_the_tensor(
    change: Callable[[Any, str], Any], told: str, tmp_path: Path
) -> None:
    folder, name = without_a_fused_forward("starcoder2", tmp_path), "model.layers.0.self_attn.q_proj"
    tensors = load_file(folder / "model.safetensors")
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors")
    config = EngineConfig.from_arguments(folder, skip_tokenizer_init=True)
    with pytest.raises(CorruptModelError, match=told.format(name)):
        CpuRunner(config, show_progress=False).load()


def test_weights_of_such_a_model_are_not_updated(tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    runner = make_runner(without_a_fused_forward("starcoder2", tmp_path), dtype="float32")
    told = "a quantized checkpoint that runs through transformers, cannot be updated; build a new engine"
    with pytest.raises(UnsupportedModelError, match=told):
        runner.stage_weights(WeightSource("1", "an update", str(tmp_path)))


def test_numbers_that_stay_in_float32_are_those_of_the_files(tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    """transformers keeps routers in float32, whatever the type of the model."""
    folder = without_a_fused_forward("deepseek-v3", tmp_path, wanted="self_attn.")
    runner = make_runner(folder, dtype="bfloat16", model_impl="transformers")
    tensors = load_file(folder / "model.safetensors")
    for part in ("weight", "e_score_correction_bias"):
        exact = tensors[f"model.layers.1.mlp.gate.{part}"]
        found = getattr(runner.decoder.model.get_submodule("model.layers.1.mlp.gate"), part)
        assert found.dtype == torch.float32
        assert torch.equal(found, exact)
    assert not torch.equal(exact.bfloat16().float(), exact), "they have more digits than the type of the model"
