"""The fused forwards against transformers, by logits, on random weights scaled so that logits matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from actorllm.model.cpu.decoder import QKNorm
from actorllm.model.cpu.layers import RotaryEmbedding
from tests.model.hf.releases import config_values

TOLERANCE = 5e-4
"""Of logits whose standard deviation is about 5; float32 rounding is some 1e-5."""

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama multi-query": ("Llama", {"num_key_value_heads": 1}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 7}),
    "mistral short window": ("Mistral", {"sliding_window": 3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": None}),
    "qwen2 window": (
        "Qwen2",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3 biased": ("Qwen3", {"attention_bias": True, "head_dim": 24}),
    "qwen3 window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
}


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of that name, with biases and norms that matter, saved to the folder."""
    family, differences = MODELS[name]
    values = {k: v for k, v in (SHAPE | differences).items() if not (k == "head_dim" and v is None)}
    config = getattr(transformers, f"{family}Config")(**config_values(values), attn_implementation="eager")
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.normal_(1.0, 0.3)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.mul_(12.0)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.fixture(params=MODELS)
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, Path]:
    return request.param, save(request.param, tmp_path / "model"), tmp_path / "model"


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], length).tolist()


def difference(driver: Any, model: Any) -> float:
    """Largest error of the last step's logits, over its rows."""
    worst = 0.0
    for row, slot in enumerate(driver.rows):
        computed = driver.requests[slot].num_computed
        expected = reference(model, driver.requests[slot].tokens[:computed])[-1]
        worst = max(worst, float((driver.logits[row] - expected).abs().max()))
    return worst


@pytest.mark.parametrize("chunk", [3, 8, 29])
def test_chunked_prefill_and_decode_equal_transformers(
    named: tuple[str, Any, Path], chunk: int, make_driver: Callable[..., Any]
) -> None:
    _, model, folder = named
    driver = make_driver(folder, seed=chunk)
    tokens = prompt(chunk, 29)
    driver.add(0, tokens)
    assert float(reference(model, tokens).std()) > 1.0, "the logits do not matter"
    for start in range(0, 29, chunk):
        driver.step({0: min(chunk, 29 - start)})
    assert difference(driver, model) < TOLERANCE
    for _ in range(6):
        driver.step(decode=[0])
        assert difference(driver, model) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 3, 4, 20])
@pytest.mark.parametrize("name", ["llama", "mistral window", "qwen3"])
def test_a_prompt_may_begin_with_blocks_of_others(
    name: str, chunk: int, tmp_path: Path, make_driver: Callable[..., Any]
) -> None:
    """Two requests take over a prefix while its owner decodes, go on in chunks of any size, and decode beside it."""
    model = save(name, tmp_path / "model")
    driver = make_driver(tmp_path / "model")
    driver.add(0, prompt(1, 18))
    driver.step(prefill={0: 18})
    driver.step(decode=[0])
    owner = driver.requests[0]
    for slot, num_cached in ((1, 16), (2, 4)):
        driver.add(slot, [*owner.tokens[:num_cached], *prompt(slot, 15 - slot)], num_computed=num_cached)
        request = driver.requests[slot]
        driver.free.extend(request.blocks[: num_cached // 4])
        request.blocks[: num_cached // 4] = owner.blocks[: num_cached // 4]
        size = len(request.tokens)
        for start in range(num_cached, size, chunk):
            driver.step(prefill={slot: min(chunk, size - start)})
            assert difference(driver, model) < TOLERANCE
    for _ in range(6):
        driver.step(decode=[0, 1, 2])
        assert difference(driver, model) < TOLERANCE


def test_mixed_steps_equal_transformers(named: tuple[str, Any, Path], make_driver: Callable[..., Any]) -> None:
    """Rows join while others decode, and leave again; every row of every step is compared."""
    _, model, folder = named
    driver = make_driver(folder)
    driver.add(2, prompt(1, 5))
    driver.add(0, prompt(2, 17))
    driver.step({2: 5, 0: 9})
    assert driver.rows == [2]
    assert difference(driver, model) < TOLERANCE
    driver.add(5, prompt(3, 2))
    driver.step({0: 8, 5: 2}, decode=[2])
    assert driver.rows == [2, 0, 5]
    assert difference(driver, model) < TOLERANCE
    for _ in range(3):
        driver.step(decode=[5, 0, 2])
        assert difference(driver, model) < TOLERANCE
    driver.remove(0)
    driver.add(0, prompt(4, 11))
    driver.step({0: 11}, decode=[2, 5])
    assert driver.rows == [2, 5, 0]
    assert difference(driver, model) < TOLERANCE
    driver.step()
    assert driver.rows == [2, 5]
    assert difference(driver, model) < TOLERANCE


def run_one(driver: Any) -> None:
    driver.add(0, prompt(5, 20))
    driver.step({0: 20})
    driver.step(decode=[0])


@pytest.mark.parametrize("name", ["mistral window", "qwen2 window", "qwen3 window"])
def test_control_a_dropped_or_changed_window_is_seen(
    name: str, tmp_path: Path, make_runner: Callable[..., Any], make_driver: Callable[..., Any]
) -> None:
    model = save(name, tmp_path)
    for change in (lambda w: None, lambda w: w and w + 1, lambda w: w and w - 1):
        driver = make_driver(tmp_path)
        decoder = driver.runner.decoder
        windows = tuple(change(w) for w in decoder.config.windows)
        decoder.config = dataclasses.replace(decoder.config, windows=windows)
        decoder._windows = tuple(dict.fromkeys(windows))
        for layer, window in zip(decoder.layers, windows, strict=True):
            layer.window = window
        run_one(driver)
        assert difference(driver, model) > 20 * TOLERANCE


def test_control_windows_on_the_wrong_layers_are_seen(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    model = save("qwen2 window", tmp_path)
    driver = make_driver(tmp_path)
    for layer, window in zip(driver.runner.decoder.layers, (6, 6, None), strict=True):
        layer.window = window
    run_one(driver)
    assert difference(driver, model) > 20 * TOLERANCE


def test_control_without_qk_norm(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    model = save("qwen3", tmp_path)
    driver = make_driver(tmp_path)
    for layer in driver.runner.decoder.layers:
        assert isinstance(layer.qk_norm, QKNorm)
        layer.qk_norm = None
    run_one(driver)
    assert difference(driver, model) > 20 * TOLERANCE


@pytest.mark.parametrize("name", ["llama", "llama 3 rope", "llama linear rope", "qwen3"])
def test_control_wrong_rope(name: str, tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    """Another theta, or no scaling: both must be seen."""
    model = save(name, tmp_path)
    driver = make_driver(tmp_path)
    theta = 10_001.0 if name == "llama" else 10_000.0 if name.startswith("llama 3") else 505.0
    frequencies = 1.0 / (theta ** (torch.arange(0, 16, 2).float() / 16))
    angles = torch.outer(torch.arange(128.0), frequencies if name != "llama" else frequencies * 1.01)
    driver.runner.decoder.rotary = [RotaryEmbedding(angles)]
    run_one(driver)
    assert difference(driver, model) > 20 * TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral window", "qwen2", "qwen3"])
def test_control_positions_off_by_one(name: str, tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    """A shift of all positions is invisible to rotary embeddings; a shift of the decode row alone is not."""
    model = save(name, tmp_path)
    driver = make_driver(tmp_path)
    driver.add(0, prompt(5, 20))
    driver.step({0: 20})
    (rotary,) = driver.runner.decoder.rotary
    rotary.table = rotary.table.roll(-1, 0)
    driver.step(decode=[0])
    assert difference(driver, model) > 20 * TOLERANCE


def test_control_biases(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    model = save("llama biased", tmp_path)
    for name in ("qkv", "output", "gate_up", "down"):
        driver = make_driver(tmp_path)
        getattr(driver.runner.decoder.layers[1], name).bias = None
        run_one(driver)
        assert difference(driver, model) > 20 * TOLERANCE, name


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    name: str, tmp_path: Path, make_driver: Callable[..., Any]
) -> None:
    """Same bfloat16 weights, all three ways; transformers in float32 is the truth."""
    half = save(name, tmp_path, torch.bfloat16)
    exact = save(name, tmp_path / "exact", torch.bfloat16).float()
    driver = make_driver(tmp_path, dtype="bfloat16")
    assert driver.runner.dtype == torch.bfloat16
    ours, theirs = [], []
    for slot in range(4):
        driver.add(slot, prompt(slot, 20))
    for chunk in (8, 8, 4):
        driver.step(dict.fromkeys(range(4), chunk))
    for _ in range(4):
        driver.step(decode=[0, 1, 2, 3])
        for row in range(4):
            tokens = driver.requests[row].tokens[: driver.requests[row].num_computed]
            truth = reference(exact, tokens)[-1]
            ours.append(driver.logits[row] - truth)
            theirs.append(reference(half, tokens)[-1] - truth)
    our_error, their_error = torch.stack(ours).square().mean().sqrt(), torch.stack(theirs).square().mean().sqrt()
    assert our_error < 1.25 * their_error


def test_the_batch_does_not_change_a_rows_logits(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    """Alone, and among rows of other lengths: float32 logits agree to rounding."""
    save("qwen3", tmp_path)
    alone, crowd = make_driver(tmp_path, seed=1), make_driver(tmp_path, seed=2)
    alone.add(0, prompt(1, 13))
    alone.step({0: 13})
    for slot, length in enumerate((13, 40, 2, 25, 7)):
        crowd.add(slot, prompt(slot + 1, length))
        crowd.step({slot: length})
        if slot == 0:
            assert torch.allclose(alone.logits[0], crowd.logits[0], atol=1e-5)
    for _ in range(5):
        alone.step(decode=[0])
        crowd.step(decode=[4, 3, 0, 1, 2])
        assert float((alone.logits[0] - crowd.logits[2]).abs().max()) < 2e-5
    assert alone.requests[0].tokens == crowd.requests[0].tokens
