"""Attention over latents on a device: streams are those of the CPU worker (float32), in recorded steps and launched ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm import LLM
from actorllm.actors.worker import WorkerActor
from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from tests.effort import each_value
from tests.model.adapters.lora_folders import write_adapter
from tests.model.cuda.adapted import LORA
from tests.model.cuda.conftest import config_of
from tests.model.cuda.host_engine import ARGUMENTS, generate, load
from tests.model.cuda.mixtures import DEEPSEEK_V2, DEEPSEEK_V3, follow
from tests.model.cuda.twins import Twins, prompt

WIDTH = DEEPSEEK_V3["kv_lora_rank"] + DEEPSEEK_V3["qk_rope_head_dim"]
FAMILIES = {"deepseek-v2": DEEPSEEK_V2, "deepseek-v3": DEEPSEEK_V3}


@pytest.mark.parametrize(("is_recorded", "family"), each_value([True, False], list(FAMILIES)))
def test_streams_are_those_of_the_cpu_worker(family: str, is_recorded: bool, make_twins: Callable[..., Twins]) -> None:
    twins = make_twins(FAMILIES[family], enforce_eager=not is_recorded)
    while is_recorded and twins.runner.record_next():
        pass
    follow(twins)
    assert (twins.runner.graphs.num_launched == 0) == is_recorded


def test_pairs_that_are_half_a_head_apart_in_the_checkpoint(make_twins: Callable[..., Twins]) -> None:
    follow(make_twins(DEEPSEEK_V3 | {"rope_interleave": False, "norm_topk_prob": False}))


def test_a_cache_holds_one_row_of_a_token_for_all_heads(make_twins: Callable[..., Twins]) -> None:
    """Forks copy it, and states that are no numbers leave nothing in it."""
    twins = make_twins(DEEPSEEK_V3)
    runner = twins.runner
    assert runner.block_bytes == 64 * 2 * WIDTH * 4
    assert runner.pool.shape == (2, 24, 1, 1, 64, WIDTH)
    twins.add(0, prompt(70, 1))
    twins.add(1, prompt(20, 2))
    twins.step({0: 70, 1: 20})
    with torch.inference_mode():
        for one in (twins.cpu_runner, runner):
            one.model.embedding[twins.tokens(1)[-1]] = torch.nan
    result = twins.step(decode=[0, 1])
    assert result.nonfinite_rows.tolist() == [1]
    assert np.isfinite(twins.tokens(0)).all()
    assert runner.pool.isfinite().all()


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_rounded_weights(method: str, folder: Callable[..., Path], make_quantized: Callable[..., Twins]) -> None:
    """Also that of the products which are made on queries and results."""
    follow(make_quantized(folder(**DEEPSEEK_V3), quantization=method))


@pytest.mark.timeout(120)
def test_engines_have_the_streams_of_the_cpu(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps launched ahead, prompts in chunks, log-probabilities, forks, requests that give way, and prefixes from the cache."""
    path, few = str(folder(**DEEPSEEK_V2)), {"num_gpu_blocks_override": 5, "max_num_batched_tokens": 48}
    with LLM(path, **ARGUMENTS) as llm:
        expected = generate(llm)
    monkeypatch.setattr(WorkerActor, "_load", load)
    with LLM(path, **ARGUMENTS | few) as llm:
        assert generate(llm) == expected
        assert llm.stats()["scheduler"]["scheduler"]["num_preemptions"] > 0
    with LLM(path, **ARGUMENTS | {"num_gpu_blocks_override": 24}) as llm:
        assert generate(llm) == expected
        assert generate(llm) == expected
        assert llm.stats()["scheduler"]["scheduler"]["prefix_cache"]["hits"] > 0


def test_what_it_is_not_made_for_is_refused(folder: Callable[..., Path], tmp_path: Path) -> None:
    def refusal(config: Any) -> str:
        with pytest.raises(UnsupportedModelError) as caught:
            CudaRunner(config, show_progress=False, device=HostDevice()).load()
        return str(caught.value)

    config = config_of(folder(**DEEPSEEK_V3), block_size=64)
    rounded = replace(config, cache=replace(config.cache, dtype="fp8"))
    assert refusal(rounded).startswith(
        "kv_cache_dtype='fp8' is not supported on CUDA with the latent attention of Deep"
    )
    write_adapter(tmp_path / "one", {"model.layers.0.self_attn.q_proj": (128, 64)}, seed=1, size=1.0)
    adapted = config_of(folder(**DEEPSEEK_V3), block_size=64, **LORA)
    assert "enable_lora=True is not supported on CUDA" in refusal(adapted)
    wide = config_of(folder(**DEEPSEEK_V3 | {"kv_lora_rank": 520}), block_size=64)
    assert "latents of 520 numbers with 8 that are rotated are not supported on CUDA" in refusal(wide)
