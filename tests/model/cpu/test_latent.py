"""Attention over latents: what the cache holds, and that it does not matter how, or beside what, a row is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu import latent
from actorllm.model.cpu.latent import LatentBatch, LatentCache, working_bytes
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.registry import decoder_config
from tests.model.driver import Driver
from tests.model.families.loaded import cpu_driver
from tests.model.hf.decoders import TOLERANCE, difference, prompt, reference, save
from tests.model.hf.releases import needs_modules

V2_LITE: dict[str, Any] = {
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 10_000,
    "max_position_embeddings": 163_840,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
"""As DeepSeek-V2-Lite has it."""

KIMI_K2: dict[str, Any] = V2_LITE | {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
}


GLM_FLASH: dict[str, Any] = {
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_nextn_predict_layers": 1,
    "rope_theta": 1_000_000,
    "partial_rotary_factor": 1.0,
}
"""As GLM 4.7 Flash has it, where that is not the default."""


def latent_driver(folder: Path, **arguments: Any) -> Driver:
    driver = cpu_driver(folder, **arguments)
    assert isinstance(driver.runner.cache, LatentCache)
    return driver


@pytest.mark.parametrize(
    ("architecture", "hf"),
    [("DeepseekV2ForCausalLM", V2_LITE), ("DeepseekV3ForCausalLM", KIMI_K2), ("Glm4MoeLiteForCausalLM", GLM_FLASH)],
)
def test_a_token_takes_a_tenth_of_what_keys_and_values_of_all_heads_take(architecture: str, hf: dict[str, Any]) -> None:
    plan = decoder_config(architecture, hf)
    assert plan.latent is not None
    assert plan.latent.width == 576
    heads = 2 * plan.num_heads * plan.head_dim
    assert plan.latent.width * 10 <= heads


def test_the_cache_has_the_size_that_is_computed(tmp_path: Path) -> None:
    save("deepseek-v3", tmp_path)
    runner = latent_driver(tmp_path).runner
    width, num_layers = 12 + 8, 2
    assert runner.block_bytes == width * num_layers * runner.config.cache.block_size * 4
    assert isinstance(runner.cache, LatentCache)
    assert runner.cache.pool[:, 0].numel() * 4 == runner.block_bytes
    assert runner.profile_num_blocks() > 0


def test_prompts_are_expanded_and_decode_rows_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kind of row, whatever is beside it."""
    save("deepseek-v2", tmp_path)
    driver = latent_driver(tmp_path)
    seen: list[tuple[str, int]] = []
    absorbed, expanded = LatentBatch._absorbed, LatentBatch._expanded

    def absorbing(self: Any, layer: int, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(("absorbed", len(query)))
        return absorbed(self, layer, query, *rest)

    def expanding(self: Any, layer: int, query: torch.Tensor, fresh: torch.Tensor, row: Any, *rest: Any) -> None:
        seen.append(("expanded", row.end - row.start))
        expanded(self, layer, query, fresh, row, *rest)

    monkeypatch.setattr(LatentBatch, "_absorbed", absorbing)
    monkeypatch.setattr(LatentBatch, "_expanded", expanding)
    driver.add(0, prompt(1, 9))
    driver.step({0: 9}, decode=[])
    driver.add(1, prompt(2, 3))
    driver.step({1: 1}, decode=[0])
    assert seen == [("expanded", 9)] * 2 + [("absorbed", 1), ("expanded", 1)] * 2


def test_heads_that_are_expanded_one_by_one_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save("deepseek-v3", tmp_path)
    monkeypatch.setattr(latent, "MAX_EXPANDED", 1)
    monkeypatch.setattr(latent, "MAX_GATHERED", 1)
    driver = latent_driver(tmp_path)
    driver.add(0, prompt(1, 30))
    driver.add(1, prompt(2, 11))
    driver.step({0: 20, 1: 11}, decode=[])
    driver.step({0: 10}, decode=[1])
    assert difference(driver, model) < TOLERANCE
    driver.step(decode=[0, 1])
    assert difference(driver, model) < TOLERANCE
    assert len(driver.runner.cache.decodes[None].groups) == 2  # type: ignore[attr-defined]


def test_the_memory_of_a_long_row_is_bounded() -> None:
    plan = decoder_config("DeepseekV3ForCausalLM", KIMI_K2)
    assert plan.latent is not None
    all_heads = 131_072 * 64 * (192 + 128) * 8
    assert working_bytes(plan.latent, 64, 131_072) < all_heads / 20


@torch.inference_mode()
def test_copies_and_cleared_blocks(tmp_path: Path) -> None:
    save("deepseek-v2", tmp_path)
    runner = latent_driver(tmp_path).runner
    cache = runner.cache
    assert isinstance(cache, LatentCache)
    cache.pool.normal_()
    first, second = cache.pool[:, 3].clone(), cache.pool[:, 5].clone()
    cache.copy(np.array([3, 5], np.int32), np.array([5, 9], np.int32))
    assert torch.equal(cache.pool[:, 5], first)
    assert torch.equal(cache.pool[:, 9], second), "read before it is written"
    cache.zero(np.array([3], np.int32))
    assert not cache.pool[:, 3].any()
    assert torch.equal(cache.pool[:, 5], first)
    cache.release()
    assert not cache.pool.any()


@needs_modules
def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = save("deepseek-v2", tmp_path)
    expected = reference(model, prompt(1, 41))
    distances = []
    for arguments in ({}, {"model_impl": "transformers"}):
        driver = cpu_driver(tmp_path, dtype="bfloat16", **arguments)
        driver.add(0, prompt(1, 40))
        driver.step({0: 40}, decode=[])
        assert driver.logits is not None
        distances.append(float((driver.logits[0] - expected[-2]).square().mean().sqrt()))
    assert distances[0] < 1.5 * distances[1] + 0.02


def test_int8_weights_keep_the_products_of_latents(tmp_path: Path) -> None:
    model = save("deepseek-v2", tmp_path, first_k_dense_replace=2)
    driver = latent_driver(tmp_path, quantization="int8")
    driver.add(0, prompt(1, 40))
    driver.step({0: 40}, decode=[])
    assert driver.logits is not None
    expected = reference(model, prompt(1, 40))[-1]
    assert float(torch.corrcoef(torch.stack((driver.logits[0], expected)))[0, 1]) > 0.98


def test_layers_that_guess_tokens_are_not_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save("deepseek-v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    drafts = {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors | {name: drafts[name] for name in drafts if "layers.2." in name}, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    driver = latent_driver(tmp_path)
    driver.add(0, prompt(1, 20))
    driver.step({0: 20}, decode=[])
    assert difference(driver, model) < TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "change", "told"),
    [
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("DeepseekV3ForCausalLM", {"n_group": 5}, "n_group=5"),
        ("DeepseekV3ForCausalLM", {"topk_group": 3}, "topk_group=3 is more than n_group=1"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": -1}, "kv_lora_rank is -1"),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": "x"}, "first_k_dense_replace is 'x'"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["sparse"]}, "layer_types has 1 entries for 61 layers"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"] * 60 + ["wide"]}, "mlp_layer_types has 'wide'"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["sparse"] * 60 + ["dense"]}, "'dense' behind 'sparse'"),
    ],
)
def test_what_a_shape_cannot_say_is_refused_by_name(architecture: str, change: dict[str, Any], told: str) -> None:
    from actorllm.errors import ModelError

    hf = V2_LITE if architecture.startswith("DeepseekV2") else KIMI_K2
    assert isinstance(decoder_config(architecture, hf), DecoderConfig)
    with pytest.raises(ModelError, match=told):
        decoder_config(architecture, hf | change)


@pytest.mark.parametrize(
    "arguments",
    [{"kv_cache_dtype": "int8"}, {"enable_lora": True}, {"batch_invariant": True}],
    ids=lambda a: next(iter(a)),
)
def test_what_latents_are_not_made_for_is_refused_by_name(arguments: dict[str, Any], tmp_path: Path) -> None:
    save("deepseek-v2", tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{next(iter(arguments))}=.* latent attention of DeepseekV2"):
        cpu_driver(tmp_path, **arguments)
