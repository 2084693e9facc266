"""Checkpoints with int8 weights: the codes and scales of the files, and what is refused of them."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, CorruptModelError, UnsupportedModelError
from actorllm.model.cpu.layers import PackedLinear
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import Int8Linear
from actorllm.types.quantization import read_checkpoint
from tests.model.hf.decoders import save

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
from weights import W8A8

SCHEME: dict[str, Any] = W8A8 | {
    "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down_proj$"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with scales of bfloat16 that are not those of its largest weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and "1.mlp.down_proj" not in name:
            scales = (tensor.abs().amax(1, keepdim=True) / 100).bfloat16()
            found[name] = (tensor / scales.float()).round().to(torch.int8)
            found[f"{layer}.weight_scale"] = scales
        else:
            found[name] = tensor.clone()
    save_file(found, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    return folder


def changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


def test_codes_and_scales_are_those_of_the_files(checkpoint: Path, make_driver: Callable[..., Any]) -> None:
    """By the product of every layer, bit by bit; what the checkpoint ignores is dense."""
    decoder = make_driver(checkpoint).runner.decoder
    tensors = load_file(checkpoint / "model.safetensors")
    x = torch.randn(3, 48)
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."

        def stored(name: str, prefix: str = prefix) -> Int8:
            return Int8(tensors[f"{prefix}{name}.weight"], tensors[f"{prefix}{name}.weight_scale"][:, 0].float())

        expected = torch.cat([stored(f"mlp.{name}_proj")(x) for name in ("gate", "up")], 1)
        assert torch.equal(layer.gate_up(x), expected)
        assert torch.equal(layer.output(x), stored("self_attn.o_proj")(x))
        values = stored("self_attn.v_proj")(x)
        assert torch.equal(layer.qkv(x)[:, -values.shape[1] :], values)
    assert isinstance(decoder.layers[0].down, Int8Linear)
    assert isinstance(decoder.layers[1].down, PackedLinear)
    assert isinstance(decoder.lm_head, PackedLinear)


def test_the_method_is_found(checkpoint: Path) -> None:
    for wanted in (None, "compressed-tensors"):
        config = EngineConfig.from_arguments(checkpoint, quantization=wanted, skip_tokenizer_init=True)
        assert config.model.quantization == "compressed-tensors"
    with pytest.raises(ConfigError, match="quantization='int8': the weights of this model are quantized already"):
        EngineConfig.from_arguments(checkpoint, quantization="int8", skip_tokenizer_init=True)


def test_a_gpu_takes_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with products by kind of row, about which ranks agree, and replicas would not."""
    monkeypatch.setattr("actorllm.config.choose", lambda device, **more: "cuda")
    given: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cuda"}
    twin: dict[str, Any] = {"quantization_twin": True}
    for more in (
        {},
        {"model_impl": "transformers"},
        {"tensor_parallel_size": 2},
        twin,
        twin | {"tensor_parallel_size": 2},
    ):
        assert EngineConfig.from_arguments(checkpoint, **given, **more).device == "cuda"
    with pytest.raises(ConfigError, match="quantization_twin=True is not supported with data_parallel_size=2"):
        EngineConfig.from_arguments(checkpoint, **given, **twin, data_parallel_size=2)


LAYER = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda y: y.pop(f"{LAYER}.weight_scale"), f"no tensor '{LAYER}.weight_scale'"),
        (
            lambda y: y.update({f"{LAYER}.weight": y[f"{LAYER}.weight"].float()}),
            f"tensor '{LAYER}.weight' is torch.float32, torch.int8 is needed",
        ),
        (
            lambda y: y.update({f"{LAYER}.weight_scale": torch.full((24, 1), torch.nan)}),
            f"tensor '{LAYER}.weight_scale' has scales that are negative or not finite",
        ),
        (lambda y: y.update({f"{LAYER}.weight_scale": torch.ones(24, 2)}), r"has shape \(24, 2\)"),
        (lambda y: y.update({f"{LAYER}.weight_zero_point": torch.zeros(24, 1)}), f"'{LAYER}.weight_zero_point'"),
    ],
    ids=["no scales", "floats", "nan", "groups", "zero points"],
)
def test_a_corrupt_checkpoint_is_refused_by_the_name_of_the_tensor(
    checkpoint: Path, tmp_path: Path, make_driver: Callable[..., Any], change: Callable[[Any], Any], told: str
) -> None:
    with pytest.raises(CorruptModelError, match=told):
        make_driver(changed(checkpoint, tmp_path, change))


def scheme(field: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(SCHEME)
    place: Any = tree
    *parts, last = field.split(".")
    for part in parts:
        place = place[part]
    place[last] = value
    return tree


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "aqlm"),
        ("format", "marlin-24"),
        (f"{GROUP}.targets", ["Linear", "Conv"]),
        (f"{GROUP}.weights.num_bits", 4),
        (f"{GROUP}.weights.type", "float"),
        (f"{GROUP}.weights.symmetric", False),
        (f"{GROUP}.weights.strategy", "group"),
        (f"{GROUP}.input_activations.strategy", "tensor"),
        (f"{GROUP}.input_activations.dynamic", False),
        (f"{GROUP}.input_activations.num_bits", None),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
    ],
)
def test_a_scheme_that_is_not_read_is_refused_by_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"quantized weights \(.*quantization_config\.{re.escape(field)}"):
        read_checkpoint({"quantization_config": scheme(field, value)})
    assert read_checkpoint({"quantization_config": SCHEME}) is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [("config_groups", {}), ("config_groups", {"a": 1}), ("ignore", "lm_head"), ("ignore", ["re:("])],
)
def test_what_is_no_scheme_is_refused_by_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(CorruptModelError, match=f"quantization_config.{field}"):
        read_checkpoint({"quantization_config": scheme(field, value)})
    with pytest.raises(CorruptModelError, match="quantization_config is 3, an object"):
        read_checkpoint({"quantization_config": 3})


def test_layers_of_one_product_may_have_different_forms(
    checkpoint: Path, tmp_path: Path, make_driver: Callable[..., Any]
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].float()
        del tensors[f"{LAYER}.weight_scale"]

    changed(checkpoint, tmp_path, change)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"].append(LAYER)
    (tmp_path / "config.json").write_text(json.dumps(config))
    qkv = make_driver(tmp_path).runner.decoder.layers[0].qkv
    assert [type(part) for part in qkv.parts] == [Int8Linear, PackedLinear, Int8Linear]
