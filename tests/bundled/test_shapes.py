from __future__ import annotations

import json

import pytest

from actorllm.bundled import shapes
from actorllm.config import EngineConfig
from actorllm.errors import ModelNotFoundError
from actorllm.model.registry import decoder_config

MILLIONS = {"Qwen3-0.6B": 596, "Llama-3.2-1B": 1236, "Qwen2.5-1.5B": 1544, "Qwen3-8B": 8191, "Llama-3.1-8B": 8030}
"""Parameters as their makers count them."""


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_known_model_needs_no_download_for_random_weights(name: str) -> None:
    model = EngineConfig.from_arguments(f"somebody/{name.lower()}", load_format="dummy").model
    assert model.tokenizer is None
    config = json.loads((shapes.FOLDER / name / "config.json").read_text())
    decoder_config(model.architecture, config)  # the fused forward knows it
    hidden, head = config["hidden_size"], config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = hidden * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
    tables = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    assert (config["num_hidden_layers"] * layer + tables) / 1e6 == pytest.approx(MILLIONS[name], rel=2e-3)


def test_all_shapes_are_there() -> None:
    assert sorted(MILLIONS) == shapes.SHAPES


def test_other_load_formats_want_the_weights() -> None:
    with pytest.raises(ModelNotFoundError, match="there is no model"):
        EngineConfig.from_arguments("Qwen3-8B")
