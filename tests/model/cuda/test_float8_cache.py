"""`kv_cache_dtype="fp8"` on a device: its streams are those of the CPU worker whose keys and values are rounded likewise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm.config import EngineConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu.attention import KVWrites
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.proof.self_check import difference
from actorllm.model.cuda.runner import CudaRunner
from actorllm.types.device import rules_of
from actorllm.types.options import DEFAULTS
from actorllm_kernels import reference
from tests.model.cuda.conftest import config_of
from tests.model.cuda.twins import Twins, prompt
from tests.model.hf.decoders import save


def small_runner(path: Path) -> CudaRunner:
    """With a cache of floats of 8 bits, which a configuration without a GPU refuses."""
    config = config_of(path, block_size=64)
    config = replace(config, cache=replace(config.cache, dtype="fp8"))
    runner = CudaRunner(config, show_progress=False, device=HostDevice())
    runner.load()
    runner.allocate(24)
    return runner


@pytest.fixture
def make_rounded(make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Twins]:
    """The same requests on the device with such a cache, and on the CPU with all that is stored rounded likewise."""
    store = KVWrites.store

    def rounded(writes: KVWrites, layer: int, key_value: torch.Tensor) -> None:
        key_value.copy_(reference.float8_numbers(reference.float8_codes(key_value)))
        store(writes, layer, key_value)

    def make(differences: dict[str, Any]) -> Twins:
        twins = make_twins(differences)
        monkeypatch.setattr(KVWrites, "store", rounded)
        return Twins(twins.cpu_runner, small_runner(Path(twins.runner.config.model.path)))

    return make


@pytest.mark.parametrize("differences", [
    {}, {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
])  # fmt: skip
def test_streams_are_those_of_rounded_keys_and_values(
    differences: dict[str, Any], make_rounded: Callable[..., Twins]
) -> None:
    twins = make_rounded(differences)
    twins.add(0, prompt(80, 1), temperature=0.8, seed=7)
    twins.step({0: 70}, decode=[])
    twins.add(1, prompt(9, 2))
    twins.step({0: 10, 1: 9})
    for _ in range(4):
        twins.step(decode=[0, 1])
    twins.remove(0)
    twins.add(2, prompt(40, 3), temperature=1.0, seed=5)
    twins.step({2: 40}, decode=[1])
    twins.step(decode=[1, 2])


def test_it_takes_a_byte_for_each_number(folder: Callable[..., Path], make_runner: Callable[..., CudaRunner]) -> None:
    plain, small = make_runner(folder()), small_runner(folder())
    assert small.pool.dtype == torch.uint8
    assert plain.block_bytes == 4 * small.block_bytes  # float32
    assert plain.pool.nbytes == 4 * small.pool.nbytes


def test_models_through_transformers_are_refused_by_name(tmp_path: Path) -> None:
    save("starcoder2", tmp_path)
    with pytest.raises(
        UnsupportedModelError, match="kv_cache_dtype='fp8' is not supported on CUDA for models that run through"
    ):
        small_runner(tmp_path)


def test_what_stays_refused_is_named() -> None:
    options = dict(DEFAULTS) | {"device": "cuda", "kv_cache_dtype": "fp8"}
    assert rules_of("cuda").why_not(options, pools=False) is None
    refused = rules_of("cuda").why_not(options | {"model_impl": "transformers"}, pools=False)
    assert (
        refused
        == "kv_cache_dtype='fp8' is not supported on CUDA with model_impl='transformers' yet; leave one of them out"
    )


def test_a_configuration_for_a_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.types.device.why_not_cuda", lambda: None)
    config = EngineConfig.from_arguments("storyteller", kv_cache_dtype="fp8_e4m3", device="cuda")
    assert config.cache.dtype == "fp8"
    assert config.cache.hash_key


def test_the_self_check_takes_the_next_code_of_few_numbers_and_no_other() -> None:
    codes = reference.float8_codes(torch.randn(1000))
    few, many, far = codes.clone(), codes.clone(), codes.clone()
    few[:10] += 1
    many[:200] += 1
    far[0] ^= 0x80
    assert difference(codes, codes, "keys") is None
    assert difference(few, codes, "keys") is None
    assert "200 of" in str(difference(many, codes, "values"))
    assert "by up to" in str(difference(far, codes, "keys"))
    assert difference(few, codes, "pool") == "differs in 10 entries"
