"""Options of the engine: what is given reaches its configuration, and its own errors say what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actorllm import cli
from actorllm.client.engine import Engine
from actorllm.config import EngineConfig
from actorllm.errors import ActorLLMError

GIVEN: dict[str, tuple[str, Any]] = {
    "--tensor-parallel-size=2": ("tensor_parallel_size", 2),
    "--scheduling-policy=priority": ("scheduling_policy", "priority"),
    "--admission-policy=past-future": ("admission_policy", "past-future"),
    "--policy=edf": ("scheduling_policy", "edf"),
    "--step-model=a100-llama-3-8b": ("step_model", "a100-llama-3-8b"),
    "--no-enable-prefix-caching": ("enable_prefix_caching", False),
    "--enable-prefix-caching": ("enable_prefix_caching", True),
    "--no-async-scheduling": ("async_scheduling", False),
    "--block-size=16": ("block_size", 16),
    "--max-model-len=64": ("max_model_len", 64),
    "--max-model-len=0.1k": ("max_model_len", 100),
    "--max-num-seqs=7": ("max_num_seqs", 7),
    "--max-num-batched-tokens=700": ("max_num_batched_tokens", 700),
    "--max-num-partial-prefills=2": ("max_num_partial_prefills", 2),
    "--long-prefill-token-threshold=50": ("long_prefill_token_threshold", 50),
    "--kv-cache-memory-bytes=100000000": ("kv_cache_memory_bytes", 100_000_000),
    "--gpu-memory-utilization=0.1": ("gpu_memory_utilization", 0.1),
    "--enforce-eager": ("enforce_eager", True),
    "--no-trust-remote-code": ("trust_remote_code", False),
    "--on-failure=raise": ("on_failure", "raise"),
    "--load-format=dummy": ("load_format", "dummy"),
    "--model-impl=transformers": ("model_impl", "transformers"),
    "--max-logprobs=5": ("max_logprobs", 5),
    "--generation-config=vllm": ("generation_config", "vllm"),
    "--dtype=float32": ("dtype", "float32"),
}


class ReachedError(ActorLLMError):
    """The engine would be built now."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configurations of the engines that would be built, which are not."""
    configs: list[EngineConfig] = []

    def build(_: Engine, config: EngineConfig, **options: Any) -> None:
        configs.append(config)
        raise ReachedError("built")

    monkeypatch.setattr(Engine, "__init__", build)
    return configs


@pytest.mark.parametrize("command", ["generate", "chat", "run-batch", "replay", "throughput", "latency"])
def test_every_command_that_builds_an_engine_takes_them(
    command: str, built: list[EngineConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").touch()
    words = {
        "generate": ["generate", "Once"],
        "chat": ["chat"],
        "run-batch": ["run-batch", str(tmp_path / "in"), str(tmp_path / "out"), "--seed=9"],
        "replay": ["replay"],
        "throughput": ["bench", "throughput", "--input-len=4", "--output-len=4", "--seed=9"],
        "latency": ["bench", "latency", "--input-len=4", "--output-len=4", "--seed=9"],
    }[command]
    seed = 9 if "--seed=9" in words else None
    for option, (name, value) in GIVEN.items():
        assert cli.main([*words, option]) == 2
        assert "ReachedError: built" in capsys.readouterr().err
        expected = {"enable_prefix_caching": False} if command in ("throughput", "latency") else {}
        expected |= {"seed": seed, name: value}
        assert built.pop() == EngineConfig.from_arguments("storyteller", **expected)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--tensor-parallel-size=0", "tensor_parallel_size=0"),
        ("--block-size=-1", "block_size=-1"),
        ("--gpu-memory-utilization=2", "gpu_memory_utilization=2"),
        ("--on-failure=hope", "on_failure='hope'"),
        ("--max-num-batched-tokens=0", "max_num_batched_tokens=0"),
    ],
)
def test_the_engine_says_what_is_wrong(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "Once", option]) == 2
    assert words in capsys.readouterr().err
