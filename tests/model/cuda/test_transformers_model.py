"""Models of transformers, over the GPU's cache and attention."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.graphs import MAX_MISSES
from actorllm.model.cuda.prompt_products import TWO_KINDS
from actorllm.model.cuda.quantized import DeviceQuantized
from actorllm.model.cuda.runner import GRAPH_BYTES, CudaRunner
from actorllm.model.cuda.transformers_model import DeviceTransformers
from actorllm.model.hf import loading, transformers_backend
from actorllm.model.hf.packing import PackedModule
from actorllm.model.hf.transformers_backend import TransformersDecoder
from tests.model.cuda.conftest import config_of
from tests.model.cuda.decoders import GEMMA2, GPT_OSS
from tests.model.cuda.twins import DeviceDriver, Twins, prompt
from tests.model.quantization.layouts import save_both

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "num_attention_heads": 2,
    "n_layer": 2,
    "n_positions": 256,
}
QWEN3: dict[str, Any] = {"model_type": "qwen3"}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of modules are graphs here, which they are not unless it is asked for."""
    monkeypatch.setenv("ACTORLLM_EXPERIMENTAL", "recorded-modules")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("differences", [QWEN3, GPT2, GEMMA2, GPT_OSS], ids=["qwen3", "gpt2", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_the_cpu(make_twins: Callable[..., Twins], differences: dict[str, Any]) -> None:
    """Windows, caps of scores and sinks included."""
    twins = make_twins(differences, model_impl="transformers", enforce_eager=True)
    assert isinstance(twins.runner.model, DeviceTransformers)
    twins.add(0, prompt(70, 1))
    twins.add(1, prompt(9, 2), temperature=0.8, seed=1, top_p=0.9)
    twins.step({0: 60, 1: 9}, decode=[])
    twins.step({0: 10}, decode=[1])
    twins.step(decode=[1, 0])
    twins.step()
    assert not twins.runner.wants_to_record


@pytest.mark.timeout(120)
@pytest.mark.parametrize("differences", [QWEN3, GPT2, GEMMA2, GPT_OSS], ids=["qwen3", "gpt2", "gemma2", "gpt_oss"])
def test_recorded_steps_give_the_tokens_of_the_cpu(
    make_twins: Callable[..., Twins], differences: dict[str, Any]
) -> None:
    """Of other requests than those that were recorded, over the border of a block, as they come and go."""
    twins = make_twins(differences, model_impl="transformers", max_num_seqs=4)
    runner = twins.runner
    twins.add(0, prompt(62, 1))
    twins.add(3, prompt(9, 2), temperature=0.8, seed=1, top_p=0.9)
    twins.step({0: 62, 3: 9}, decode=[])
    while runner.record_next():
        pass
    launched, replays = runner.graphs.num_launched, runner.graphs.num_replays
    twins.step(decode=[3, 0])
    twins.step()
    twins.add(1, prompt(5, 3), temperature=1.0, seed=3)
    twins.step({1: 5})
    for _ in range(2):
        twins.step(decode=[0, 1, 3])
    twins.remove(3)
    twins.step(decode=[1, 0])
    assert (runner.graphs.num_launched, runner.graphs.num_replays) == (launched, replays + 5)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("method", "differences"),
    [("int8", QWEN3), ("int4", GPT2), ("fp8", QWEN3 | {"tie_word_embeddings": True}), ("int8", GPT_OSS)],
    ids=["int8", "int4-conv1d", "fp8-tied", "int8-experts"],
)
def test_tokens_of_quantized_layers_are_those_of_the_oracle(
    method: str,
    differences: dict[str, Any],
    folder: Callable[..., Path],
    make_quantized: Callable[..., Twins],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launched and recorded; of few rows and of many, and a chunk beside decode rows."""
    if method == "fp8":  # of plain weights on CUDA only, which a configuration without a GPU refuses
        monkeypatch.setattr("actorllm.config.FP8", "")
    twins = make_quantized(folder(**differences), model_impl="transformers", quantization=method, max_num_seqs=4)
    runner = twins.runner
    model: Any = runner.model
    plain = [module for module in model.loaded.model.modules() if isinstance(module, torch.nn.Linear)]
    packed: list[Any] = [module.product for module in model.loaded.model.modules() if isinstance(module, PackedModule)]
    assert not plain
    quantized = [one.product for one in packed if isinstance(one.product, DeviceQuantized)]
    assert len(quantized) == len(packed)
    assert sum(one.num_bytes for one in packed) < 0.4 * sum(4 * one.out_features * one.in_features for one in packed)
    twins.add(0, prompt(70, 1))
    twins.add(1, prompt(9, 2), temperature=0.8, seed=1, top_p=0.9)
    twins.step({0: 60, 1: 9}, decode=[])
    twins.step({0: 10}, decode=[1])
    while runner.record_next():
        pass
    replays = runner.graphs.num_replays
    for _ in range(3):
        twins.step(decode=[1, 0])
    assert runner.graphs.num_replays > replays


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        "fp8-channel",
        pytest.param("gptq-desc_act", marks=pytest.mark.slow(reason="test_stored_layers reads the same files")),
        pytest.param("packed-zeros", marks=pytest.mark.slow(reason="test_stored_layers reads the same files")),
    ],
)
def test_quantized_checkpoints_have_the_tokens_of_the_fused_forward(
    name: str, tmp_path: Path, make_runner: Callable[..., CudaRunner]
) -> None:
    """The same codes, in the same products: those of rows of prompts, too, where these have their own."""
    path, _ = save_both(name, tmp_path)
    twin = name == "fp8-channel" or None

    def stream(impl: str) -> tuple[CudaRunner, list[list[int]]]:
        runner = make_runner(path, model_impl=impl, load_format="auto", max_num_seqs=4, quantization_twin=twin)
        assert runner.scheme == (TWO_KINDS if twin else None)
        driver = DeviceDriver(runner, num_blocks=24)  # type: ignore[arg-type]
        driver.add(0, [token % 97 for token in prompt(70, 1)])
        driver.add(1, [token % 97 for token in prompt(9, 2)], temperature=0.8, seed=1, top_p=0.9)
        driver.step({0: 60, 1: 9}, decode=[])
        driver.step({0: 10}, decode=[1])
        for _ in range(3):
            driver.step(decode=[1, 0])
        return runner, [request.tokens for request in driver.requests.values()]

    (fused, expected), (runner, found) = stream("auto"), stream("transformers")
    assert found == expected
    model: Any = runner.model
    named = model.loaded.model.named_modules()
    made = {name: module.product.product for name, module in named if isinstance(module, PackedModule)}
    ours: Any = fused.model
    for index, layer in enumerate(ours.layers):
        for part, own in (("self_attn.o_proj", layer.output), ("mlp.down_proj", layer.down)):
            other = made[f"model.layers.{index}.{part}"]
            if twin:
                other, own = other.base, own.base
            assert isinstance(other, DeviceQuantized)
            assert torch.equal(other.codes.view(torch.uint8), own.codes.view(torch.uint8))
            assert torch.equal(other.scales, own.scales)


def test_a_layer_that_is_given_other_rows_than_tokens_has_one_kind_of_product(
    folder: Callable[..., Path], make_runner: Callable[..., CudaRunner]
) -> None:
    """As in an expert that is a module of its own: found in the check at the start, for good."""
    forward = PackedModule.forward

    def in_halves(module: PackedModule, x: torch.Tensor) -> torch.Tensor:
        if module.in_features != 96 or x.shape[1] < 2:  # not the down product
            return forward(module, x)
        middle = x.shape[1] // 2
        return torch.cat((forward(module, x[:, :middle]), forward(module, x[:, middle:])), 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedModule, "forward", in_halves)
        runner = make_runner(folder(**QWEN3), model_impl="transformers", quantization="int8", quantization_twin=True)
    assert runner.scheme == TWO_KINDS
    model: Any = runner.model
    packed = [module.product for module in model.loaded.model.modules() if isinstance(module, PackedModule)]
    assert {one.in_features for one in packed if one._has_other_rows} == {96}


def test_a_rounding_that_changes_too_much_is_refused(
    folder: Callable[..., Path], make_runner: Callable[..., CudaRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorllm.model.hf.probe.MAX_QUANTIZED", {4: 1e-4})
    with pytest.raises(UnsupportedModelError, match=r"quantization='int4': the logits of architecture .* change by"):
        make_runner(folder(**QWEN3), model_impl="transformers", quantization="int4")


def counting(layer: torch.nn.Module) -> None:
    """Let it do something else in every call: a number that Python keeps."""
    calls = itertools.count()
    layer.register_forward_hook(lambda _, __, output: output * (1.0 + 0.5 * (next(calls) % 3)))


def tiring(layer: torch.nn.Module) -> None:
    """Let it change after a prompt, two steps, one for nobody and a capture: what is launched then is another model."""
    calls = itertools.count()
    layer.register_forward_hook(lambda _, __, output: output if next(calls) < 5 else output * 2.0)


def reading(layer: torch.nn.Module) -> None:
    """Let it look at a value."""
    layer.register_forward_hook(lambda _, __, output: output * 2 if output.sum().item() > 1e9 else output)


def selecting(layer: torch.nn.Module) -> None:
    """Let it look for values: how many there are depends on them."""

    def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        output[output > 1e9] = torch.zeros(1)[0]
        return output

    layer.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (counting, "replayed, its logits differ by"),
        (tiring, "replayed, its logits differ by"),
        (reading, "EngineError: it cannot be captured"),
        (selecting, "EngineError: it cannot be captured"),
    ],
)
def test_a_model_that_does_more_than_launches_is_not_recorded(
    make_twins: Callable[..., Twins],
    caplog: pytest.LogCaptureFixture,
    change: Callable[[torch.nn.Module], None],
    words: str,
) -> None:
    runner = make_twins(QWEN3, model_impl="transformers").runner
    assert runner.wants_to_record
    change(runner.model.loaded.model.model.layers[1].mlp)
    caplog.clear()
    runner.allocate(24)
    assert not runner.wants_to_record
    assert re.search(
        f"decode steps of Qwen3ForCausalLM are launched kernel by kernel, not as graphs: {words}", caplog.text
    )
    assert ("reads a value" in caplog.text) == (change in (reading, selecting))
    driver = DeviceDriver(runner, num_blocks=24)
    driver.add(0, prompt(20, 1))
    driver.step({0: 20}, decode=[])
    for _ in range(MAX_MISSES + 2):
        driver.step(decode=[0])
    assert runner.graphs.num_replays == 0


def test_nothing_is_left_of_the_requests_that_a_recording_is_tried_with(make_twins: Callable[..., Twins]) -> None:
    runner = make_twins(QWEN3, model_impl="transformers").runner
    assert runner._pool.pool.abs().amax() == 0
    assert runner.state.snapshot().abs().amax() == 0
    assert not runner.batch.columns.is_live.any()


def test_logits_that_a_module_makes_have_room(make_twins: Callable[..., Twins]) -> None:
    """The cache is smaller by them, for every row that there may be, and by those of graphs."""
    how: dict[str, Any] = {"max_num_batched_tokens": 64, "gpu_memory_utilization": 0.9, "max_logprobs": 0}
    differences = {**QWEN3, "vocab_size": 40_000}
    own, eager, recorded = (
        make_twins(differences, **how, **more).runner
        for more in ({}, {"model_impl": "transformers", "enforce_eager": True}, {"model_impl": "transformers"})
    )
    logits = 3 * 8 * 40_000 * 4
    sizes = [runner.profile_num_blocks() * runner.block_bytes for runner in (own, eager, recorded)]
    assert abs(sizes[0] - sizes[2] - 2 * logits) < own.block_bytes
    assert abs(sizes[1] - sizes[0] - GRAPH_BYTES + logits) < own.block_bytes


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
    monkeypatch.setattr(loading, "tensor_files", lambda _: {})
    monkeypatch.setattr(transformers_backend, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=read))
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
