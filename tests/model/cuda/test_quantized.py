"""Quantized weights on a device: its streams are those of the CPU worker with the same weights, dequantized (float32)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm.errors import ConfigError
from actorllm.model.cuda.quantized import SLICE_NUMBERS, DeviceQuantized, ReadOnHost, Workspaces, linear
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import side_by_side
from actorllm.model.quantization.checkpoint import CheckpointForm
from actorllm.model.quantization.float8 import Fp8
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.int8 import Int8
from actorllm.types.device import rules_of
from actorllm.types.options import DEFAULTS
from actorllm.types.quantization import read_checkpoint
from tests.model.cuda.conftest import config_of
from tests.model.cuda.dequantized import dense, follow
from tests.model.cuda.twins import Twins, prompt
from tests.model.quantization.layouts import FP8, save_both

CPU = torch.device("cpu")


def forms(runner: CudaRunner) -> set[type]:
    model: Any = runner.model
    return {type(part) for y in model.layers for part in (y.qkv, y.output, y.gate_up, y.down)}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("method", ["int8", "int4", "int4-g64", "fp8"])
def test_streams_of_rounded_weights_are_those_of_the_oracle(
    method: str, is_tied: bool, folder: Callable[..., Path], make_quantized: Callable[..., Twins]
) -> None:
    differences: dict[str, Any] = {"tie_word_embeddings": is_tied}
    arguments = {"quantization": method}
    if method == "fp8":  # of plain weights on CUDA only, which a configuration without a GPU refuses
        differences["quantization_config"], arguments = FP8, {}
    twins = make_quantized(folder(**differences), **arguments)
    assert forms(twins.runner) == {DeviceQuantized}
    model: Any = twins.runner.model
    parts = [model.lm_head, *(part for y in model.layers for part in (y.qkv, y.output, y.gate_up, y.down))]
    assert isinstance(model.lm_head, DeviceQuantized)
    assert model.num_bytes < 0.3 * sum(4 * part.out_features * part.in_features for part in parts)
    follow(twins)


@pytest.mark.parametrize(
    "name",
    ["gptq", "gptq-desc_act", "awq", "packed-zeros", "packed-8", "fp8", "fp8-channel", "fp8-block", "nvfp4"],
)
def test_streams_of_quantized_checkpoints_are_those_of_the_oracle(
    name: str, tmp_path: Path, make_quantized: Callable[..., Twins]
) -> None:
    path, _ = save_both(name, tmp_path)
    twins = make_quantized(path, load_format="auto")
    assert forms(twins.runner) == {DeviceQuantized}
    is_float = {layer.qkv.codes.dtype == torch.float8_e4m3fn for layer in twins.runner.model.layers}  # type: ignore[attr-defined]
    assert is_float == {name.startswith("fp8")}  # a block of "fp8-block" is as wide as these layers
    twins.add(0, [token % 97 for token in prompt(70, 1)], temperature=0.8, seed=7)
    twins.step({0: 70}, decode=[])
    twins.add(1, [token % 97 for token in prompt(9, 2)])
    twins.step({1: 9}, decode=[0])
    for _ in range(3):
        twins.step(decode=[0, 1])


@pytest.mark.parametrize("form", [Int8, Fp8, Int4])
@pytest.mark.parametrize("num_rows", [3, 100])
def test_a_product_is_that_of_the_dequantized_weight(form: Any, num_rows: int) -> None:
    """Also of more numbers than are dequantized at a time."""
    torch.manual_seed(0)
    num_inputs = 4096
    num_outputs = SLICE_NUMBERS // num_inputs + 40
    bias = torch.randn(num_outputs)
    weight = form.of(torch.randn(num_outputs, num_inputs) / 64, bias)
    x, exact = torch.randn(num_rows, num_inputs), dense(weight).weight.T
    product = linear(weight, Workspaces(torch.float32, CPU))
    wide = torch.empty(num_rows, num_outputs)
    product.wide(x, wide)  # type: ignore[attr-defined]
    torch.testing.assert_close(product(x), x @ exact + bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(wide, x @ exact, rtol=1e-4, atol=1e-4)


def test_a_plain_head_that_is_the_embedding_stays_where_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a device, `cpu` copies: the head would be a second embedding there."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    embedding = torch.randn(8, 32)
    head = ReadOnHost(Dense).head_of(embedding)
    assert isinstance(head, Dense)
    assert head.weight is embedding
    assert isinstance(ReadOnHost(Int8).head_of(embedding), Int8)


def test_layers_side_by_side_may_have_several_forms() -> None:
    torch.manual_seed(0)
    parts: list[Any] = [Int4.of(torch.randn(32, 64)), Int8.of(torch.randn(16, 64)), Dense(torch.randn(8, 64))]
    product = linear(side_by_side(parts), Workspaces(torch.float32, CPU))
    for num_rows in (3, 100):
        x = torch.randn(num_rows, 64)
        expected = torch.cat([x @ dense(part).weight.T for part in parts], 1)
        torch.testing.assert_close(product(x), expected, rtol=1e-4, atol=1e-4)


def test_a_plain_head_that_is_the_embedding_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    scheme = read_checkpoint({"quantization_config": FP8})
    assert scheme is not None
    embedding = torch.randn(8, 16)
    head: Any = linear(ReadOnHost(CheckpointForm(scheme)).head_of(embedding), Workspaces(torch.float32, CPU))
    assert head.weight is embedding


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"quantization": "int4-g64", "quantization_twin": True}, "quantization_twin=True"),
        ({"quantization": "gptq", "quantization_twin": True}, "quantization_twin=True"),
        ({"quantization": "gguf", "model_impl": "transformers"}, "model_impl='transformers'"),
    ],
)
def test_what_stays_refused_is_named(options: dict[str, Any], told: str) -> None:
    refused = rules_of("cuda").why_not(dict(DEFAULTS) | {"device": "cuda"} | options, pools=False)
    assert refused is not None
    assert told in refused
    assert options["quantization"] in refused
    taken = {"quantization": options["quantization"]}
    assert rules_of("cuda").why_not(dict(DEFAULTS) | {"device": "cuda"} | taken, pools=False) is None


def test_plain_weights_are_no_floats_of_8_bits_on_the_cpu(folder: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"quantization='fp8': config\.json has no quantization_config"):
        config_of(folder(), quantization="fp8")
