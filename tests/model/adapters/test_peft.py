"""Adapters that peft itself has written: logits are those of peft's own model, and what is refused is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm.errors import InvalidParameterError
from tests.model.adapters.adapted_models import adapted_driver, expected, last_logits, put
from tests.model.hf.decoders import TOLERANCE, prompt, save

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("computed_as_asked"),
    pytest.mark.slow(reason="needs peft"),
    # Between peft and transformers.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

LENGTH = 23


def trained(model: Any, folder: Path, **settings: Any) -> Any:
    """A model with an adapter that is not nothing, which is saved in the folder."""
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize(
    ("family", "model_impl"),
    [("llama", "vllm"), ("qwen3", "vllm"), ("phi3", "vllm"), ("gpt2", "transformers"), ("opt", "transformers")],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 6},
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {"r": 4, "lora_alpha": 6, "rank_pattern": {"0.self_attn.q_proj": 2, "down_proj": 8, "c_fc": 3}},
        {"r": 2, "alpha_pattern": {"o_proj": 1, "layers.1.self_attn.qkv_proj": 9}, "init_lora_weights": "gaussian"},
    ],
    ids=["plain", "rslora", "ranks", "alphas"],
)
def test_logits_are_those_of_peft(family: str, model_impl: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = save(family, tmp_path / "base")
    tokens = prompt(1, LENGTH)
    driver = adapted_driver(tmp_path / "base", model_impl=model_impl)
    adapted = trained(model, tmp_path / "adapter", target_modules="all-linear", **settings)
    put(driver.runner, 1, tmp_path / "adapter")
    logits = last_logits(driver, {0: (tokens, 1)})[0]
    assert (logits - expected(adapted, driver, 0, LENGTH)).abs().max() < TOLERANCE
    with adapted.disable_adapter():
        assert (logits - expected(adapted, driver, 0, LENGTH)).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"lm_head.* adapts nothing"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens.* adapts nothing"),
    ],
)
def test_what_is_refused_of_peft_is_named(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    model = save("llama", tmp_path / "base")
    driver = adapted_driver(tmp_path / "base")
    trained(model, tmp_path / "adapter", **{"r": 4, "target_modules": ["q_proj"]} | settings)
    with pytest.raises(InvalidParameterError, match=told):
        put(driver.runner, 1, tmp_path / "adapter")
