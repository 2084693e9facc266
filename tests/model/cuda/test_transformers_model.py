"""Models of transformers, over the GPU's cache and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda.transformers_model import DeviceTransformers
from tests.model.cuda.twins import Twins, prompt

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "num_attention_heads": 2,
    "n_layer": 2,
    "n_positions": 256,
}
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "sliding_window": 24,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 15.0,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "sliding_window": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
QWEN3: dict[str, Any] = {"model_type": "qwen3"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("differences", [QWEN3, GPT2, GEMMA2, GPT_OSS], ids=["qwen3", "gpt2", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_the_cpu(make_twins: Callable[..., Twins], differences: dict[str, Any]) -> None:
    """Windows, caps of scores and sinks included; nothing is recorded."""
    twins = make_twins(differences, model_impl="transformers")
    assert isinstance(twins.runner.model, DeviceTransformers)
    twins.add(0, prompt(70, 1))
    twins.add(1, prompt(9, 2), temperature=0.8, seed=1, top_p=0.9)
    twins.step({0: 60, 1: 9}, decode=[])
    twins.step({0: 10}, decode=[1])
    twins.step(decode=[1, 0])
    twins.step()
    assert not twins.runner.wants_to_record


def test_heads_without_a_kernel_are_refused(make_twins: Callable[..., Twins]) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match="heads of size 8 are not supported on CUDA: the kernels take even sizes from 18 to 256",
    ):
        make_twins({**GPT2, "num_attention_heads": 8}, model_impl="transformers")
