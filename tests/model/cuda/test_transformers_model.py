"""Models of transformers, over the GPU's cache and attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model import transformers_backend
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.cuda.transformers_model import DeviceTransformers
from actorllm.model.transformers_backend import TransformersDecoder
from tests.model.cuda.conftest import config_of
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
    """Windows, caps of scores and sinks included."""
    twins = make_twins(differences, model_impl="transformers")
    assert isinstance(twins.runner.model, DeviceTransformers)
    twins.add(0, prompt(70, 1))
    twins.add(1, prompt(9, 2), temperature=0.8, seed=1, top_p=0.9)
    twins.step({0: 60, 1: 9}, decode=[])
    twins.step({0: 10}, decode=[1])
    twins.step(decode=[1, 0])
    twins.step()
    assert not twins.runner.wants_to_record


@pytest.mark.parametrize("can_place", [False, True])
def test_weights_are_read_to_the_device_where_transformers_can_do_that(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, can_place: bool
) -> None:
    asked: list[Any] = []

    def read(*_: Any, **how: Any) -> None:
        asked.append(how.get("device_map"))
        raise OSError("no weights")

    config = config_of(folder(**QWEN3), block_size=64, model_impl="transformers", load_format="auto")
    runner = CudaRunner(config, show_progress=False, device=HostDevice())
    monkeypatch.setattr(transformers_backend, "is_accelerate_available", lambda: can_place)
    monkeypatch.setattr(transformers_backend, "tensor_files", lambda _: {})
    monkeypatch.setattr(transformers_backend, "AutoModel", SimpleNamespace(from_pretrained=read))
    with pytest.raises(CorruptModelError, match="no weights"):
        runner.load()
    assert asked == [{"": torch.device("cpu")} if can_place else None]


def test_a_model_is_checked_where_it_runs(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the attention of the device, which sees other keys here than it should."""
    attend = ops.attn_prefill

    def forgetful(*args: Any, **how: Any) -> None:
        attend(*args, **how | {"window": 2})

    runner = CudaRunner(
        config_of(folder(**QWEN3), block_size=64, model_impl="transformers"), show_progress=False, device=HostDevice()
    )
    monkeypatch.setattr(ops, "attn_prefill", forgetful)
    with pytest.raises(UnsupportedModelError, match="in chunks its logits differ from transformers' own"):
        runner.load()


def test_prompts_of_embeddings_are_checked_where_they_run(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"block_size": 64, "model_impl": "transformers", "enable_prompt_embeds": True}
    runner = CudaRunner(config_of(folder(**QWEN3), **how), show_progress=False, device=HostDevice())
    runner.load()
    embed = TransformersDecoder.embed
    monkeypatch.setattr(TransformersDecoder, "embed", lambda self, ids: 2 * embed(self, ids))
    with pytest.raises(UnsupportedModelError, match="does more with ids than to look up 64 numbers for each"):
        runner.load()


def test_heads_without_a_kernel_are_refused(make_twins: Callable[..., Twins]) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match="heads of size 8 are not supported on CUDA: the kernels take even sizes from 18 to 256",
    ):
        make_twins({**GPT2, "num_attention_heads": 8}, model_impl="transformers")
