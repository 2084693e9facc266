"""Models in float16: logits against transformers in float32, on the CPU and on the emulated device; streams; errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm import LLM, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, InvalidPromptError
from actorllm.messages.embeds import encode_rows
from actorllm.model.cpu import layers
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.linear.dense import Dense
from tests.model.families.loaded import cpu_driver, device_driver
from tests.model.hf.decoders import prompt, reference, save

TOLERANCE = 0.015
"""Root mean square error of logits whose standard deviation is about 2. bfloat16 costs 0.03 and more."""

SHAPE = {"max_position_embeddings": 256, "hidden_size": 128}


def on_the_cpu(folder: Path) -> Any:
    return cpu_driver(folder, dtype="half")


def on_the_device(folder: Path) -> Any:
    return device_driver(folder, dtype="float16")


def through_transformers(folder: Path) -> Any:
    return cpu_driver(folder, dtype="auto", model_impl="transformers")


def logits_of(driver: Any) -> torch.Tensor:
    """Of the last step."""
    runner = driver.runner
    return runner.sampler.logits[: len(driver.rows)].clone() if isinstance(runner, CudaRunner) else driver.logits


@pytest.mark.parametrize("make", [on_the_cpu, on_the_device, through_transformers])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_transformers_in_float32(family: str, make: Callable[[Path], Any], tmp_path: Path) -> None:
    """Of the same weights in float16, for a prompt in chunks and decode steps of two rows; the KV cache is float16, too."""
    exact = save(family, tmp_path, torch.float16, **SHAPE).float()
    driver = make(tmp_path)
    runner = driver.runner
    on_device = isinstance(runner, CudaRunner)
    if on_device:
        runner.model.head = None  # so that logits are written
    assert runner.dtype == torch.float16
    assert (runner._pool if on_device else runner.cache).pool.dtype == torch.float16
    errors = []
    driver.add(0, prompt(1, 70))
    driver.add(3, prompt(2, 5))
    driver.step({0: 40, 3: 5}, decode=[])
    driver.step({0: 30}, decode=[3])
    for _ in range(4):
        driver.step(decode=[3, 0])
        logits = logits_of(driver)
        for row, slot in enumerate(driver.rows):
            tokens = driver.requests[slot].tokens[: driver.requests[slot].num_computed]
            errors.append(logits[row] - reference(exact, tokens)[-1])
    assert 0 < float(torch.stack(errors).square().mean().sqrt()) < TOLERANCE


def test_scores_that_are_not_scaled_yet_may_be_larger_than_float16(tmp_path: Path) -> None:
    """Keys and queries of some models (Qwen2) are large, and their products are small only when they are scaled."""
    model = save("qwen2", tmp_path, torch.float16, **SHAPE)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.bias.fill_(60.0)  # 32 dimensions, 60 * 60 each: 115,200
    model.save_pretrained(tmp_path)
    driver = on_the_cpu(tmp_path)
    driver.add(0, prompt(1, 6))
    driver.step({0: 6}, decode=[])
    assert not driver.step(decode=[0]).nonfinite_rows.size


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("storyteller", dtype="half", topology="inline", num_threads=1, max_model_len=128) as engine:
        yield engine


PROMPTS = ["Once upon a time", "The cat", "Lily went to the park because she"]


def test_streams_are_equal_in_every_batch(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=24, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0, 1, 0.7))]
    together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    alone = [
        llm.generate(p, one, use_tqdm=False)[0].outputs[0].token_ids for p, one in zip(PROMPTS, params, strict=True)
    ]
    assert together == alone


def test_products_are_widened_where_the_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    weight, bias, x = torch.randn(8, 16).half(), torch.randn(8).half(), torch.randn(3, 16).half()
    product = layers.linear(Dense(weight, bias))
    found = product(x)
    assert found.dtype == torch.float16
    assert torch.allclose(found.float(), x.float() @ weight.float().T + bias.float(), rtol=2e-3, atol=2e-3)
    assert product.num_bytes == 4 * 8 * 16


@pytest.mark.parametrize("is_fast", [False, True])
def test_it_is_said_once_that_products_are_widened(
    is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("actorllm.model.cpu.runner.widens", lambda dtype: dtype == torch.float16 and not is_fast)
    save("llama", tmp_path, torch.float16, **SHAPE)
    with caplog.at_level(logging.WARNING):
        on_the_cpu(tmp_path)
        cpu_driver(tmp_path, dtype="bfloat16")
    assert caplog.text.count("computed in float32") == (not is_fast)


# Arguments ------------------------------------------------------------------------------------------------------------


def folder_of(path: Path, **config: Any) -> Path:
    sizes = {"vocab_size": 300, "max_position_embeddings": 64, "hidden_size": 64, "num_attention_heads": 2}
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | sizes | config))
    return path


@pytest.mark.parametrize("stored", [{"dtype": "float16"}, {"torch_dtype": "float16"}])
def test_auto_is_what_the_weights_are_stored_in(tmp_path: Path, stored: dict[str, str]) -> None:
    config = EngineConfig.from_arguments(folder_of(tmp_path, **stored), skip_tokenizer_init=True, device="cpu")
    assert config.model.dtype == "float16"
    assert EngineConfig.from_json(config.to_json()) == config


def test_models_whose_states_are_too_large_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type="gemma3_text", dtype="float16")
    config = EngineConfig.from_arguments(folder, skip_tokenizer_init=True, device="cpu")
    assert config.model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="dtype='half': the states of a 'gemma3_text' model are larger than float16"):
        EngineConfig.from_arguments(folder, skip_tokenizer_init=True, dtype="half", device="cpu")


def test_rows_of_embeddings_are_rounded_to_float16() -> None:
    numbers = np.array([[1.0004883, -0.0, 65504.0, 1e-8]], np.float32)
    assert np.array_equal(encode_rows(numbers, "float16"), numbers.astype(np.float16).view(np.uint8).reshape(-1))
    with pytest.raises(InvalidPromptError, match="too large for float16"):
        encode_rows(np.array([[65536.0]], np.float32), "float16")
