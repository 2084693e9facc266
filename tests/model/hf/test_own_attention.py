"""Layers that attend by code of their own, and layers of different shapes: on a device, with other caches, and in lent modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda.transformers_model import DeviceTransformers
from actorllm.model.hf import own_attention
from actorllm.model.hf.own_attention import ARCHITECTURES
from actorllm.model.hf.own_attention.exchanged import ExchangedAttention
from actorllm.model.hf.probe import PROBED_POSITIONS
from actorllm.model.hf.twin import twin
from tests.model.architectures import architecture_of
from tests.model.families.loaded import chunks_and_decode_steps, device_driver
from tests.model.hf.decoders import MODELS, TOLERANCE, difference, prompt, reference, save
from tests.model.hf.releases import needs_modules

pytestmark = needs_modules
HEADS_OF_32 = {"hidden_size": 128}
"""The kernels of the device take none of 12 dimensions."""


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("falcon, new", HEADS_OF_32),
        ("gpt-neo", HEADS_OF_32),
        ("gemma4", {"head_dim": 32, "global_head_dim": 64}),
        ("gemma4", {"head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ],
    ids=["falcon", "gpt-neo", "gemma4", "gemma4, fewer key heads"],
)
def test_logits_on_a_device_are_those_of_transformers(name: str, differences: dict[str, Any], tmp_path: Path) -> None:
    if "attention_k_eq_v" in differences:
        differences = differences | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    model = save(name, tmp_path, max_position_embeddings=256, **differences)
    driver = device_driver(tmp_path)
    assert isinstance(driver.runner.model, DeviceTransformers)
    chunks_and_decode_steps(driver, model)


def test_alibi_is_refused_by_name_where_it_is_not_added(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    save("bloom", tmp_path, hidden_size=192)
    with pytest.raises(UnsupportedModelError, match=r"'BloomForCausalLM' .*ALiBi.* use device='cpu'"):
        device_driver(tmp_path, max_model_len=64)
    with pytest.raises(
        UnsupportedModelError, match=r"kv_cache_dtype='int8' .*ALiBi.* of BloomForCausalLM .* leave it out"
    ):
        make_driver(tmp_path, kv_cache_dtype="int8", block_size=8)


def test_a_short_model_has_positions_for_the_probe(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    model = save("bloom", tmp_path)
    driver = make_driver(tmp_path, max_model_len=12, dtype="float32")
    assert driver.runner.config.model.max_model_len < PROBED_POSITIONS
    driver.add(0, prompt(1, 9))
    driver.step({0: 9}, decode=[])
    assert difference(driver, model) < TOLERANCE


def test_a_module_of_the_application_keeps_its_attention(tmp_path: Path) -> None:
    """The engine exchanges that of its twin, and the twin can go back to what transformers computes."""
    model = save("bloom", tmp_path)
    kinds = [type(part) for part in model.modules()]
    before = reference(model, prompt(1, 20))
    other = twin(model)
    own_attention.exchange(other, "BloomForCausalLM", 64)
    assert sum(isinstance(part, ExchangedAttention) for part in other.modules()) == 2
    own_attention.choose(other, None)
    assert (reference(other, prompt(1, 20)) == before).all()
    assert [type(part) for part in model.modules()] == kinds
    assert (reference(model, prompt(1, 20)) == before).all()


def test_every_such_architecture_is_compared() -> None:
    found = {architecture_of(family) for family, _ in MODELS.values()} & set(ARCHITECTURES)
    assert found == set(ARCHITECTURES), "add the architecture to tests/model/hf/decoders.py"
