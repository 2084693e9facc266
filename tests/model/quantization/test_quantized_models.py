"""Engines with `quantization="int8"`: the error against the original, equal streams, deaths, ranks, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm import LLM, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, UnsupportedModelError
from actorllm.model.cpu.layers import PackedLinear
from actorllm.model.hf.packing import PackedModule
from actorllm.model.quantization import int4, int8
from actorllm.model.quantization.int4pack import Int4Linear
from actorllm.model.quantization.onednn import Int8Linear
from actorllm.model.weights import CheckpointWeights
from tests.model.hf.decoders import RECURRENT, prompt, save
from tests.model.quantization.probing import TEXT, error, logits
from tests.model.ranks import model_folder, streams

pytestmark = pytest.mark.usefixtures("computed_as_asked")

MAX_ERROR = 0.04
MAX_INT4_ERROR = 0.12


def logits_of(make_driver: Callable[..., Any], **arguments: Any) -> torch.Tensor:
    """Of all positions of TEXT."""
    driver = make_driver("storyteller", skip_tokenizer_init=False, **arguments)
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(driver.runner.config.model.path)(TEXT).input_ids
    return logits(driver.runner, ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_change_little(dtype: str, make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits_of(make_driver, dtype="float32")
    found = logits_of(make_driver, dtype=dtype, quantization="int8")
    assert 0.005 < error(found, expected) <= MAX_ERROR
    # Six bits for weights and activations are not enough: the measure sees them.
    monkeypatch.setattr(int8.Int8, "LARGEST", 31)
    monkeypatch.setattr(int8, "LIMIT", 31)
    monkeypatch.setattr(int8, "_LARGEST", torch.tensor(31.0))
    assert error(logits_of(make_driver, dtype=dtype, quantization="int8"), expected) > 2 * MAX_ERROR


def test_every_layer_and_the_head_are_quantized_and_the_embedding_is_not(make_driver: Callable[..., Any]) -> None:
    model = make_driver("storyteller", dtype="bfloat16", compute_scheme="bfloat16").runner.decoder
    decoder = make_driver("storyteller", dtype="bfloat16", quantization="int8").runner.decoder
    for layer in decoder.layers:
        assert all(isinstance(y, Int8Linear) for y in (layer.qkv, layer.output, layer.gate_up, layer.down))
    assert isinstance(decoder.lm_head, Int8Linear)
    assert torch.equal(decoder.embedding, model.embedding)
    assert 0.5 < decoder.num_bytes / model.num_bytes < 0.52


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_change_more_with_4_bits(dtype: str, make_driver: Callable[..., Any]) -> None:
    expected = logits_of(make_driver, dtype="float32")
    found = {
        name: error(logits_of(make_driver, dtype=dtype, quantization=name, quantization_twin=False), expected)
        for name in ("int4", "int4-g64", "int4-g128")
    }
    assert 0.03 < found["int4"] <= MAX_INT4_ERROR
    twin = logits_of(make_driver, dtype=dtype, quantization="int4", quantization_twin=True)
    assert 0.03 < error(twin, expected) <= MAX_INT4_ERROR, "rows of prompts, whose products may have 8 bits"
    # Groups that are too large are not enough: the measure sees them.
    assert found["int4"] < found["int4-g64"] <= found["int4-g128"]


def test_three_bits_are_not_enough(make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits_of(make_driver, dtype="float32")
    monkeypatch.setattr(int4, "LARGEST", 7)
    assert (
        error(logits_of(make_driver, dtype="bfloat16", quantization="int4", quantization_twin=False), expected)
        > 1.2 * MAX_INT4_ERROR
    )


def test_layers_have_4_bits_and_the_head_8(make_driver: Callable[..., Any]) -> None:
    arguments = {"dtype": "bfloat16", "quantization": "int4", "quantization_twin": False}
    decoder = make_driver("storyteller", **arguments).runner.decoder
    for layer in decoder.layers:
        assert all(isinstance(y, Int4Linear) for y in (layer.qkv, layer.output, layer.gate_up, layer.down))
    assert isinstance(decoder.lm_head, Int8Linear)


OTHER_KINDS = ["gemma3", "gpt-oss", "llama4", "deepseek-v3", *sorted(RECURRENT)]


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_layers_of_every_kind_are_rounded(
    name: str, method: str, tmp_path: Path, make_driver: Callable[..., Any]
) -> None:
    """Small random models are the worst case: logits are alike, and not the same."""
    save(name, tmp_path, max_position_embeddings=256)
    found = []
    for arguments in ({}, {"quantization": method, "quantization_twin": False}):
        driver = make_driver(tmp_path, dtype="float32", **arguments)
        for slot in range(4):
            driver.add(slot, prompt(slot, 40))
        driver.step(dict.fromkeys(range(4), 40), decode=[])
        found.append(driver.logits.clone())
    alike = torch.corrcoef(torch.stack([logits.flatten() for logits in found]))[0, 1]
    assert 0.9 < alike < 0.999999


@pytest.mark.parametrize(
    "method", ["int8", pytest.param("int4", marks=pytest.mark.slow(reason="the same processes once more"))]
)
def test_streams_are_equal_in_every_batch_depth_and_topology(method: str) -> None:
    prompts = [[5 + i, 17, 33 * i + 1, 2] * (1 + i) for i in range(6)]
    params = [SamplingParams(temperature=0.9 * (i % 3 > 0), seed=i, max_tokens=24, ignore_eos=True) for i in range(6)]

    def run(**arguments: Any) -> list[list[int]]:
        arguments = {"dtype": "bfloat16", "quantization": method, "num_threads": 1, "max_model_len": 128} | arguments
        with LLM("storyteller", **arguments) as llm:
            found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
            again = llm.generate(prompts, params, use_tqdm=False)
            assert [list(o.outputs[0].token_ids) for o in again] == found, "with the prefixes in the cache"
            if arguments.get("topology") != "inline":
                worker = llm._engine.pids["worker0"]
                os.kill(worker, signal.SIGKILL)
                again = llm.generate(prompts, params, use_tqdm=False)
                assert [list(o.outputs[0].token_ids) for o in again] == found, "by another worker"
        return found

    expected = run(topology="inline", async_scheduling=False, max_num_seqs=1)
    assert len({tuple(stream) for stream in expected}) == 6
    assert run(topology="inline", max_num_seqs=8) == expected
    assert run(max_num_seqs=3) == expected


@pytest.mark.slow(reason="ranks as processes; parts of a weight are checked without")
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_ranks_share_a_quantized_model(method: str, tmp_path: Path) -> None:
    """Each has scales of its own for what it sums, so that streams of several ranks are near those of one, not equal."""
    folder = model_folder(tmp_path)
    found = streams(folder, tensor_parallel_size=2, quantization=method)
    plain = streams(folder, topology="inline", quantization=None if method == "int8" else method)
    same = sum(ours[0] == theirs[0] for ours, theirs in zip(found, plain, strict=True))
    assert same >= 7, "first tokens of ten requests, of 331 ids"


def test_models_of_transformers_have_4_bits_where_groups_fit(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    save("opt", tmp_path)  # of 48 states, and 64 within the MLP
    decoder = make_driver(tmp_path, dtype="bfloat16", quantization="int4").runner.decoder
    kinds = {n: type(m.product) for n, m in decoder.model.named_modules() if isinstance(m, PackedModule)}
    assert {kind for name, kind in kinds.items() if name.endswith("fc2")} == {Int4Linear}
    assert {kind for name, kind in kinds.items() if name.endswith(("fc1", "lm_head"))} == {Int8Linear}


def test_models_of_transformers_are_quantized_too(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    save("opt", tmp_path)
    model = make_driver(tmp_path, dtype="bfloat16").runner.decoder
    decoder = make_driver(tmp_path, dtype="bfloat16", quantization="int8").runner.decoder
    packed = [module for module in decoder.model.modules() if isinstance(module, PackedModule)]
    assert packed
    assert all(isinstance(module.product, Int8Linear) for module in packed)
    assert decoder.num_bytes < 0.8 * model.num_bytes


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_no_second_copy_of_a_model_is_made_while_it_is_rounded(
    method: str, tmp_path: Path, make_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the weights in the type of the model, no more are in memory than those of one product."""
    save("llama", tmp_path, num_hidden_layers=6)
    take, plain, most = CheckpointWeights.take, [], 0

    def noting(self: CheckpointWeights, name: str, *shape: int, **options: Any) -> torch.Tensor:
        nonlocal most
        tensor = take(self, name, *shape, **options)
        if name.endswith("_proj.weight"):
            plain.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in plain))
        return tensor

    monkeypatch.setattr(CheckpointWeights, "take", noting)
    make_runner(tmp_path, dtype="bfloat16", quantization=method, quantization_twin=False)
    assert len(plain) == 6 * 7
    assert most <= 3


def test_a_model_that_rounding_breaks_is_refused(
    tmp_path: Path, make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save("opt", tmp_path)
    monkeypatch.setattr(int8.Int8, "LARGEST", 3)
    with pytest.raises(UnsupportedModelError, match="quantization='int8': the logits of architecture 'OPTForCausalLM'"):
        make_driver(tmp_path, quantization="int8")


def test_routers_stay_dense() -> None:
    from actorllm.model.hf.packing import pack
    from actorllm.model.quantization.int8 import Int8

    block = torch.nn.ModuleDict({"gate": torch.nn.Linear(16, 4), "up_proj": torch.nn.Linear(16, 8)})
    with torch.no_grad():
        saved = pack(block, Int8)
    gate, up = block["gate"], block["up_proj"]
    assert isinstance(gate.product, PackedLinear)
    assert isinstance(up.product, Int8Linear)
    assert saved == 16 * 8 * 4 - (16 * 8 + 4 * 8)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"quantization": "int3"},
            r"quantization='int3' is not supported; use 'int8', 'int4', .* or 'bitsandbytes', or leave",
        ),
        ({"quantization": 8}, r"quantization=8 is not supported"),
        ({"quantization": "compressed-tensors"}, "config.json has no quantization_config"),
    ],
)
def test_bad_values_are_refused_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_arguments("storyteller", **arguments)


def test_a_backend_that_does_not_quantize_says_so() -> None:
    from actorllm.types.device import BackendRules, rules_of

    options = {"device": "mine", "dtype": "auto", "block_size": None, "runner": "auto", "quantization": "int8"}
    told = BackendRules().why_not(options, pools=False)
    assert told == "quantization='int8' is not supported on device='mine' yet; leave it at None"
    assert rules_of("cpu").why_not(options, pools=False) is None


def test_a_module_that_is_lent_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization='int8'"):
        EngineConfig.from_arguments(module=save("opt", tmp_path), quantization="int8", topology="inline")


def test_the_method_travels_with_the_configuration() -> None:
    """Processes of the engine, and those that take their places, get it; and so does a recording."""
    config = EngineConfig.from_arguments("storyteller", quantization="int8")
    assert config.model.quantization == "int8"
    assert EngineConfig.from_json(config.to_json()).model.quantization == "int8"
    assert json.loads(config.to_json())["model"]["quantization"] == "int8"
