"""Several ranks, each launching its part on CPU tensors, with collectives by gloo: the answers of one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors.topology import engine_topology
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, UnsupportedModelError
from actorllm.model.cuda import collectives
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from tests import programs
from tests.model.cuda.conftest import config_of
from tests.model.cuda.decoders import GPT_OSS
from tests.model.cuda.host_engine import ARGUMENTS, generate, load
from tests.model.cuda.host_processes import on_the_host, tell
from tests.model.cuda.mixtures import DEEPSEEK_V3
from tests.model.cuda.twins import prompt
from tests.model.quantization.layouts import FP8, save_both

pytestmark = pytest.mark.timeout(120)

BLOCK = 64 * 2 * 2 * 2 * 32 * 4
"""Bytes of one block of the tiny model."""


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several ranks are graphs here, which they are not unless it is asked for."""
    monkeypatch.setenv("ACTORLLM_EXPERIMENTAL", "recorded-ranks")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            {"architectures": ["LlamaForCausalLM"], "mlp_bias": True, "attention_bias": True},
            marks=pytest.mark.slow(reason="ranks as processes; olmo2 has biases and one key head"),
        ),
        {"architectures": ["Olmo2ForCausalLM"], "attention_bias": True, "num_key_value_heads": 1},
        pytest.param(
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 24, "sliding_window_pattern": 2},
            marks=pytest.mark.slow(reason="ranks as processes; olmo2 stands for the families"),
        ),
        pytest.param(
            {"architectures": ["Phi3ForCausalLM"]},
            marks=pytest.mark.slow(reason="ranks as processes; olmo2 stands for the families"),
        ),
    ],
    ids=["llama", "olmo2", "gemma3", "phi3"],
)
def test_two_ranks_answer_as_the_cpu_does(family: dict[str, Any], folder: Callable[..., Path], tmp_path: Path) -> None:
    """Step by step, with an MLP and a vocabulary that do not divide evenly, and biases that must be added once."""
    run_ranks(folder(vocab_size=301, intermediate_size=97, **family), tmp_path)


def test_rows_with_adapters_of_two_ranks_are_those_of_the_cpu(folder: Callable[..., Path], tmp_path: Path) -> None:
    run_ranks(folder(intermediate_size=97), tmp_path, "adapters")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("int8", marks=pytest.mark.slow(reason="ranks as processes; int4 has layers of 8 bits as well")),
        pytest.param("fp8", marks=pytest.mark.slow(reason="ranks as processes; int4 has layers of 8 bits as well")),
        "int4",
    ],
)
def test_quantized_layers_of_two_ranks_are_those_of_the_cpu(
    method: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    """With a vocabulary that does not divide evenly. Of 4 bits, a rank's inputs of one layer end within a group: it has 8."""
    differences: dict[str, Any] = {"vocab_size": 301, "quantization_config": FP8 if method == "fp8" else None}
    options = {} if method == "fp8" else {"quantization": method}
    run_ranks(folder(**differences), tmp_path, "quantized", json.dumps(options))


@pytest.mark.slow(reason="ranks as processes; test_prompt_products has one rank, and how several agree")
@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_prompts_of_two_ranks_have_products_of_8_bits(method: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    """Each rounds its part of a row with a scale of its own; output that is computed once more has those of decode rows."""
    options = {"quantization_twin": True} | ({} if method == "fp8" else {"quantization": method})
    run_ranks(folder(quantization_config=FP8 if method == "fp8" else None), tmp_path, "by-kind", json.dumps(options))


@pytest.mark.slow(reason="ranks as processes; test_quantized reads the same files for one rank")
@pytest.mark.parametrize("name", ["gptq", "gptq-desc_act", "awq", "packed-8", "fp8-channel"])
def test_quantized_checkpoints_of_two_ranks_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    path, _ = save_both(name, tmp_path)
    run_ranks(path, tmp_path, "quantized", json.dumps({"load_format": "auto"}))


def test_drafts_that_the_first_of_two_ranks_knows_change_no_token(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Some right, some wrong, over the border of a block; greedy, seeded, filtered, with penalties."""
    run_ranks(folder(vocab_size=301, intermediate_size=97), tmp_path, "drafts")


@pytest.mark.slow(reason="ranks as processes; the CPU's have the same parts of experts")
@pytest.mark.parametrize("what", ["experts", "whole-experts"])
def test_experts_of_two_ranks_are_those_of_the_cpu(what: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    """A part of every expert at each rank, with biases that are added once; or some experts as a whole."""
    run_ranks(folder(**GPT_OSS), tmp_path, what)


@pytest.mark.slow(reason="ranks as processes; the CPU's have the same parts of heads and experts")
@pytest.mark.parametrize("what", ["experts", "whole-experts"])
def test_latents_of_two_ranks_are_those_of_the_cpu(what: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    """Each has its heads, and all latents."""
    run_ranks(folder(**DEEPSEEK_V3), tmp_path, what)


def run_ranks(path: Path, tmp_path: Path, *more: str) -> None:
    """Two processes of `rank`, which must end well."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.model.cuda.rank", str(path), str(tmp_path / "meeting")]
    ranks = [
        programs.popen(
            [*command, str(rank), *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, words in zip(ranks, told, strict=True):
        assert rank.returncode == 0, words
        assert words.endswith("done\n")


def both(llm: LLM) -> list[Any]:
    """Requests that give way to each other, and then one prompt twice."""
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=9, ignore_eos=True, detokenize=False)
    again = [{"prompt_token_ids": prompt(70, 8)}]
    with llm:
        streams = generate(llm)
        # On a busy machine requests may come one after the other, and none gives way.
        for _ in range(20):
            if llm.stats()["scheduler"]["scheduler"]["num_preemptions"]:
                break
            assert generate(llm) == streams
        first, second = (llm.generate(again, params, use_tqdm=False)[0] for _ in range(2))
        preemptions = llm.stats()["scheduler"]["scheduler"]["num_preemptions"]
    assert preemptions > 0
    assert second.num_cached_tokens == 64
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    return [streams, first.outputs[0].token_ids]


def test_streams_are_those_of_one_rank_and_of_the_cpu(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, seeded, filtered, with penalties, log-probabilities and forks; preempted, and from cached prefixes."""
    path, few = str(folder()), {"kv_cache_memory_bytes": 5 * BLOCK}
    expected = both(LLM(path, **(ARGUMENTS | few)))
    with monkeypatch.context() as patch:
        patch.setattr(WorkerActor, "_load", load)
        assert both(LLM(path, **(ARGUMENTS | few))) == expected
    monkeypatch.setattr(
        actorllm.client.engine_supervisor, "engine_topology", lambda config: on_the_host(engine_topology(config))
    )
    few = {"kv_cache_memory_bytes": 5 * BLOCK // 2}
    assert both(LLM(path, **(ARGUMENTS | few | {"topology": "process", "tensor_parallel_size": 2}))) == expected


@pytest.mark.slow(reason="starts ranks again after each of several deaths")
async def test_streams_of_two_ranks_go_on_over_deaths(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the scheduler, what it had sent is computed by both; ranks are replaced together."""
    path = str(folder())
    alone = AsyncLLM(path, **ARGUMENTS)
    expected = await tell(alone)
    alone.shutdown()
    monkeypatch.setattr(
        actorllm.client.engine_supervisor, "engine_topology", lambda config: on_the_host(engine_topology(config))
    )
    llm = AsyncLLM(path, **(ARGUMENTS | {"topology": "process", "tensor_parallel_size": 2}))
    try:
        await llm.start()
        assert await tell(llm, ("scheduler",)) == expected
        assert await tell(llm, ("worker1",)) == expected
    finally:
        llm.shutdown()


def test_fewer_gpus_than_ranks(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(device_count=lambda: 1, is_available=lambda: True))
    config = config_of(folder(), block_size=64, topology="process", tensor_parallel_size=2)
    message = (
        "tensor_parallel_size=2 needs a GPU for every rank, and 1 can be seen .*; set tensor_parallel_size=1 or less"
    )
    with pytest.raises(ConfigError, match=message):
        collectives.own_device(config, 1)


def test_what_runs_through_transformers_is_not_shared_out() -> None:
    config = EngineConfig.from_arguments(
        "storyteller", model_impl="transformers", tensor_parallel_size=2, dtype="float32", device="cpu", block_size=64
    )
    with pytest.raises(UnsupportedModelError, match="tensor_parallel_size=2: only models with a fused forward"):
        CudaRunner(config, device=HostDevice()).load()
