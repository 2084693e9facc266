"""The step of the GPU with its own kernels, in Triton's interpreter, gives the tokens of the CPU worker (float32).

One small run through everything that a step may consist of; `test_runner` has the cases, with torch in place of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorllm.model.cuda import ops
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.graphs import GraphPart
from actorllm.model.cuda.proof import memory
from actorllm.model.cuda.runner import CudaRunner
from tests.kernels.conftest import interpreter as interpreter
from tests.model.cuda.adapted import LORA, fill
from tests.model.cuda.conftest import config_of
from tests.model.cuda.mixtures import DEEPSEEK_V3
from tests.model.cuda.rules import rules_of
from tests.model.cuda.twins import Twins, prompt
from tests.model.quantization.layouts import FP8


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "family",
    [
        {},
        pytest.param(
            {"architectures": ["Olmo2ForCausalLM"]},
            marks=pytest.mark.slow(reason="each kernel is interpreted; qwen3 has the step, test_runner the family"),
        ),
        pytest.param(
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 20, "sliding_window_pattern": 2},
            marks=pytest.mark.slow(reason="each kernel is interpreted; qwen3 has the step, test_runner the family"),
        ),
    ],
    ids=["qwen3", "olmo2", "gemma3"],
)
def test_the_tokens_are_those_of_the_cpu_worker(family: dict[str, Any], make_twins: Callable[..., Twins]) -> None:
    """A prompt in two chunks over the border of a block, a recorded decode step, and one whose logits are edited."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 300}
    twins = make_twins(shape | family)
    twins.add(0, prompt(66, 1), temperature=0.8, seed=2**63 + 5)
    twins.step({0: 62}, decode=[])
    twins.add(1, prompt(3, 2))
    twins.step({0: 4, 1: 3})
    graphs = twins.runner.graphs
    graphs._misses.clear()  # the interpreter would take its time for all sizes
    graphs.want(GraphPart.HEAD, 2)
    assert twins.runner.record_next()
    twins.step(decode=[0, 1])
    assert graphs.num_replays == 1
    twins.add(2, prompt(4, 3), temperature=1.0, seed=5, top_p=0.7)
    twins.step({2: 4}, **rules_of(2, repetition_penalty=1.5, num_logprobs=2, allowed_ids=tuple(range(200))))
    twins.step(decode=[2, 1])


@pytest.mark.slow(
    reason="each kernel is interpreted; tests/model/cuda/proof has the check, with torch in place of the kernels"
)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_self_check_suspects_no_kernel(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    """All that a small model launches, interpreted, against torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = HostDevice()
    device.proves_itself = True
    path = folder(num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, vocab_size=300)
    config = config_of(path, block_size=64, max_num_seqs=2, dtype=dtype, **LORA)
    runner = CudaRunner(config, show_progress=False, device=device)
    runner.load()
    (entry,) = memory.entries()
    assert entry["failed"] == {}
    assert ops.replaced() == []


@pytest.mark.slow(reason="each kernel is interpreted; tests/kernels has the kernels, test_quantized the step")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("method", ["int4", "fp8"])
def test_the_tokens_of_quantized_weights_are_those_of_the_oracle(
    method: str, folder: Callable[..., Path], make_quantized: Callable[..., Twins]
) -> None:
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    if method == "fp8":
        shape["quantization_config"] = FP8
    twins = make_quantized(folder(**shape), **({} if method == "fp8" else {"quantization": method}))
    twins.add(0, prompt(70, 1), temperature=0.8, seed=7)
    twins.step({0: 66}, decode=[])
    twins.add(1, prompt(3, 2))
    twins.step({0: 4, 1: 3})
    twins.step(decode=[0, 1])


@pytest.mark.timeout(200)
def test_tokens_of_rows_with_adapters_are_those_of_the_cpu_worker(
    tmp_path: Path, make_twins: Callable[..., Twins]
) -> None:
    """In a step with prompts, and in a decode step that was recorded before its adapter was there."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "num_hidden_layers": 1}
    twins = make_twins(shape, **LORA)
    graphs = twins.runner.graphs
    graphs._misses.clear()
    graphs.want(GraphPart.ADAPTED_HEAD, 2)
    assert twins.runner.record_next()
    fill(twins, tmp_path, **shape)
    twins.add(0, prompt(20, 1), adapter_id=1)
    twins.add(1, prompt(3, 2))
    twins.step({0: 20, 1: 3}, decode=[])
    twins.step(decode=[0, 1])
    assert graphs.num_replays == 1


@pytest.mark.slow(reason="each kernel is interpreted; tests/kernels has the kernels, test_experts the step")
@pytest.mark.timeout(200)
def test_tokens_of_experts_are_those_of_the_cpu_worker(make_twins: Callable[..., Twins]) -> None:
    """In a step with prompts, and in a decode step that was recorded."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "hidden_size": 32}
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    twins = make_twins({"architectures": ["Qwen3MoeForCausalLM"]} | shape | experts)
    graphs = twins.runner.graphs
    graphs._misses.clear()
    graphs.want(GraphPart.HEAD, 2)
    assert twins.runner.record_next()
    twins.add(0, prompt(20, 1))
    twins.add(1, prompt(3, 2))
    twins.step({0: 20, 1: 3}, decode=[])
    twins.step(decode=[0, 1])
    assert graphs.num_replays == 1


@pytest.mark.slow(reason="each kernel is interpreted; tests/kernels has the kernels, test_latent the step")
@pytest.mark.timeout(200)
def test_tokens_of_latents_are_those_of_the_cpu_worker(make_twins: Callable[..., Twins]) -> None:
    """In a prompt over the border of a block, and in a decode step that was recorded."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32, "moe_intermediate_size": 24}
    twins = make_twins(DEEPSEEK_V3 | shape)
    graphs = twins.runner.graphs
    graphs._misses.clear()
    graphs.want(GraphPart.HEAD, 2)
    assert twins.runner.record_next()
    twins.add(0, prompt(66, 1))
    twins.step({0: 62}, decode=[])
    twins.add(1, prompt(3, 2))
    twins.step({0: 4, 1: 3}, decode=[])
    twins.step(decode=[0, 1])
    assert graphs.num_replays == 1
