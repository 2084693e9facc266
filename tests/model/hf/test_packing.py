"""Packed linear layers: the products of the originals, one copy of the weights, and a way back where a model needs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from actorllm.model.hf import packing
from actorllm.model.hf.packing import PackedModule, pack

VOCAB = 97


def save(folder: Path, kind: str) -> Any:
    """A random model whose head is its embedding."""
    shape = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "OPT":
        shape |= {"ffn_dim": 64, "word_embed_proj_dim": 48}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**shape, **ends, max_position_embeddings=64)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "no bias", "Conv1D"])
def test_a_packed_layer_is_the_layer(kind: str, dtype: torch.dtype) -> None:
    layer = Conv1D(40, 24) if kind == "Conv1D" else torch.nn.Linear(24, 40, bias=kind == "linear")
    holder = torch.nn.ModuleDict({"a": layer.to(dtype), "b": layer})
    wide = torch.randn(3, 24, 5).to(dtype)
    inputs = [wide.transpose(1, 2), wide[0].T, wide[:, :, 0]]
    with torch.no_grad():
        expected = [layer(x.contiguous()) for x in inputs]
        pack(holder)
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(holder["a"](x), y, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0)
    assert isinstance(holder["a"], PackedModule)
    assert holder["a"] is holder["b"], "shared as before"
    assert (holder["a"].weight.dtype, tuple(holder["a"].weight.shape)) == (dtype, (40, 24))


@pytest.mark.parametrize("kind", ["OPT", "GPT2"])
def test_the_weights_of_a_model_are_packed_and_only_packed(
    kind: str, tmp_path: Path, make_driver: Callable[..., Any]
) -> None:
    model = save(tmp_path, kind)
    read = sum(parameter.numel() * 4 for parameter in model.parameters())
    decoder = make_driver(tmp_path).runner.decoder
    kinds = {type(module) for module in decoder.model.modules()}
    assert PackedModule in kinds
    assert not kinds & {torch.nn.Linear, Conv1D}
    assert decoder.num_bytes == read, "as before"
    left = {tuple(parameter.shape) for parameter in decoder.model.parameters() if parameter.ndim > 1}
    assert all(shape[0] > 48 and shape[1] == 48 for shape in left), "embeddings"
    assert len(left) == 2


@pytest.mark.parametrize("failure", ["another product", "values of a weight"])
def test_a_model_that_cannot_be_packed_is_served_as_it_is(
    failure: str,
    tmp_path: Path,
    make_driver: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = save(tmp_path, "OPT")
    if failure == "another product":
        product = PackedModule.forward
        monkeypatch.setattr(PackedModule, "forward", lambda self, x: 1.2 * product(self, x))
    else:  # as a module does that multiplies by the weight of its layer itself
        monkeypatch.setattr(PackedModule, "forward", lambda self, x: x @ self.weight.T)
    with caplog.at_level(logging.WARNING):
        driver = make_driver(tmp_path)
    assert "the linear layers stay as transformers has them" in caplog.text
    monkeypatch.undo()
    assert not any(isinstance(module, packing.PackedModule) for module in driver.runner.decoder.model.modules())
    driver.add(0, [5, 17, 33, 2])
    driver.step({0: 4}, decode=[])
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 17, 33, 2]])).logits[0, -1:]
    torch.testing.assert_close(driver.logits, expected, atol=1e-3, rtol=0)
