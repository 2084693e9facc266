"""Products of 8 bits by 8 bits for rows of prompts: the streams of an oracle that rounds their activations, in plain torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import actorllm.model.cpu.runner
from actorllm import LLM, SamplingParams
from actorllm.actors.worker import WorkerActor
from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda import ops
from actorllm.model.cuda import prompt_products as module
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.prompt_products import ONE_KIND, TWO_KINDS, DeviceByKind, PromptProducts
from actorllm.model.cuda.quantized import Workspaces, linear
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import side_by_side
from actorllm.model.quantization.float8 import Fp8
from actorllm.model.quantization.int8 import Int8
from actorllm.types.device import rules_of
from actorllm.types.options import DEFAULTS
from actorllm_kernels import reference
from tests.model.cuda.conftest import config_of
from tests.model.cuda.dequantized import follow, follow_kinds, rounds_prompts
from tests.model.cuda.host_engine import ARGUMENTS, load
from tests.model.cuda.twins import Twins, prompt
from tests.model.quantization.layouts import FP8

KINDS = {"fp8": torch.uint8, "int8": torch.int8}


@pytest.fixture
def make_by_kind(
    make_quantized: Callable[..., Twins], folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Twins]:
    """The same requests on the device, and on the CPU with dequantized weights and rounded rows of prompts."""

    def make(method: str, differences: dict[str, Any] | None = None, **arguments: Any) -> Twins:
        with_products = SimpleNamespace()
        rounds_prompts(with_products, KINDS[method])
        for name, replaced in vars(with_products).items():
            monkeypatch.setattr(actorllm.model.cpu.runner, name, replaced)
        return make_quantized(path_of(folder, method, **(differences or {})), **options(method), **arguments)

    return make


def path_of(folder: Callable[..., Path], method: str, **differences: Any) -> Path:
    return folder(**differences, **({"quantization_config": FP8} if method == "fp8" else {}))


def options(method: str) -> dict[str, Any]:
    return {"quantization_twin": True, **({"quantization": "int8"} if method == "int8" else {})}


def logits_of_prompt(runner: CudaRunner) -> torch.Tensor:
    """Of the last token of a prompt."""
    runner_twins = Twins(runner, runner)  # type: ignore[arg-type]
    runner_twins.device.add(0, prompt(70, 1))
    runner_twins.device.step({0: 70}, decode=[])
    return runner.sampler.logits[0].clone()


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_streams_are_those_of_the_oracle(method: str, make_by_kind: Callable[..., Twins]) -> None:
    """Prompts of few rows and of many, chunks beside decode rows, and output that is computed once more."""
    twins = make_by_kind(method, {"architectures": ["Qwen2ForCausalLM"]})  # it has biases
    assert twins.runner.scheme == TWO_KINDS
    follow(twins)
    follow_kinds(twins)
    expected = twins.cpu.logits
    assert expected is not None
    found = twins.runner.sampler.logits[: len(expected)]
    assert (found - expected).square().mean().sqrt() < 0.003 * expected.std()


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_decode_rows_keep_their_activations(
    method: str, folder: Callable[..., Path], make_runner: Callable[..., CudaRunner]
) -> None:
    """Output that is computed once more has the bits of decode rows; the same tokens as a prompt have others, and not far."""
    path = path_of(folder, method)
    plain = logits_of_prompt(make_runner(path, **(options(method) | {"quantization_twin": None})))
    prompts = logits_of_prompt(make_runner(path, **options(method)))
    error = (prompts - plain).square().mean().sqrt() / plain.std()
    assert 0.001 < error < 0.1
    runner = make_runner(path, **options(method))
    twins = Twins(runner, runner)  # type: ignore[arg-type]
    twins.device.add(0, prompt(70, 1), num_outputs=69)
    twins.device.step({0: 70}, decode=[])
    again = runner.sampler.logits[0]
    assert (again - plain).abs().max() < 0.5 * (prompts - plain).abs().max()


def test_steps_with_prompts_are_no_graphs(folder: Callable[..., Path], make_runner: Callable[..., CudaRunner]) -> None:
    """Of a recorded step any token may be of a prompt; decode steps stay graphs."""
    path = folder()
    assert make_runner(path, quantization="int8").mixed is not None
    runner = make_runner(path, quantization="int8", quantization_twin=True)
    assert runner.mixed is None
    assert runner.graphs.is_on


@pytest.mark.parametrize("fault", ["wrong", "raises", "slow"])
@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_products_that_are_wrong_or_slow_are_not_used(
    method: str,
    fault: str,
    folder: Callable[..., Path],
    make_runner: Callable[..., CudaRunner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = path_of(folder, method)
    expected = logits_of_prompt(make_runner(path, **(options(method) | {"quantization_twin": None})))
    name = "float8_product" if method == "fp8" else "integer_product"
    right = getattr(ops, name)

    def product(*args: Any) -> None:
        if fault == "raises":
            raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0")
        right(*args)
        if fault == "wrong":
            result = args[4 if method == "fp8" else 2]
            result += result // 8 if method == "int8" else result / 8

    monkeypatch.setattr(ops, name, product)
    if fault == "slow":
        monkeypatch.setattr(PromptProducts, "_gain", lambda *_: 0.5)
        monkeypatch.setattr(HostDevice, "proves_itself", True)
        monkeypatch.setattr(CudaRunner, "_check_kernels", lambda _: None)
    with caplog.at_level(logging.WARNING):
        runner = make_runner(path, **options(method))
    assert runner.scheme == ONE_KIND
    told = {"wrong": "is off by", "raises": "compute capability >= 9.0", "slow": "2.00 times as long"}[fault]
    assert told in caplog.text
    assert torch.equal(logits_of_prompt(runner), expected)


def test_an_engine_keeps_output_apart(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme is resolved and told; a prompt finds the blocks of another prompt, and none of output."""
    monkeypatch.setattr(WorkerActor, "_load", load)
    params = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM(str(folder()), **(ARGUMENTS | options("int8"))) as llm:

        def answer(tokens: list[int]) -> Any:
            return llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]

        first = prompt(70, 1)
        output = answer(first)
        again = answer(first)
        turn = answer([*first, *output.outputs[0].token_ids])
        scheme, told = llm.config.model.scheme, llm.stats()["workers"][0]["scheme"]
    assert scheme == told == TWO_KINDS
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert (output.num_cached_tokens, again.num_cached_tokens, turn.num_cached_tokens) == (0, 64, 64)


def test_what_another_worker_has_found_is_kept(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder(), block_size=64, quantization="int8", quantization_twin=True)

    def start(scheme: str) -> CudaRunner:
        given = dataclasses.replace(config, model=dataclasses.replace(config.model, scheme=scheme))
        runner = CudaRunner(given, show_progress=False, device=HostDevice())
        runner.load()
        return runner

    assert start(ONE_KIND).scheme == ONE_KIND
    monkeypatch.setattr(PromptProducts, "_gain", lambda *_: 0.5)
    assert start(TWO_KINDS).scheme == TWO_KINDS
    monkeypatch.setattr(PromptProducts, "_why_wrong", lambda *_: "they are wrong")
    with pytest.raises(UnsupportedModelError, match="as another worker has computed, cannot be used: they are wrong"):
        start(TWO_KINDS)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_ranks_use_them_together(
    at: int, folder: Callable[..., Path], make_runner: Callable[..., CudaRunner], caplog: pytest.LogCaptureFixture
) -> None:
    """Where another rank has no such layer, has wrong products or slower ones, none is used here."""
    runner = make_runner(folder(), **options("int8"))
    device, model = HostDevice(), runner.config.model
    votes: list[bool] = []

    def all_agree(yes: bool) -> bool:
        votes.append(yes)
        return len(votes) != at

    assert runner._prompts is not None
    device.proves_itself = True
    runner._prompts._gain = lambda *_: 2.0  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        if at == 1:
            with pytest.raises(UnsupportedModelError, match="has no such layer"):
                runner._prompts.choose(model, torch.float32, device, all_agree)
        else:
            assert runner._prompts.choose(model, torch.float32, device, all_agree) == ONE_KIND
            assert f"they are {('wrong', 'slower')[at - 2]} at another rank" in caplog.text
    assert votes == [True] * at


def test_the_time_of_both_is_measured(folder: Callable[..., Path], make_runner: Callable[..., CudaRunner]) -> None:
    runner = make_runner(folder(), quantization="int8", quantization_twin=True)
    assert runner._prompts is not None
    with torch.inference_mode():
        assert runner._prompts._gain(torch.float32, runner.device) > 0


def test_integers_of_many_rows_are_multiplied_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUMS", 48 * 40)
    base: Any = linear(Int8.of(torch.randn(48, 64), torch.randn(48)), Workspaces(torch.float32, torch.device("cpu")))
    x, out = torch.randn(85, 64), torch.empty(85, 48)
    product = DeviceByKind(base, PromptProducts())
    product.of_prompts(x, out)
    codes, factors = reference.quantized_rows(x, torch.int8)
    exact = (codes.double() * factors) @ (base.codes.double() * base.scales.double().unsqueeze(1)).T
    torch.testing.assert_close(out.double(), exact + base.bias.double(), rtol=1e-4, atol=1e-4)


def test_layers_side_by_side_and_sizes_that_matrix_units_do_not_take() -> None:
    """Each part by itself; what cannot be multiplied in 8 bits stays as it is."""
    workspaces = Workspaces(torch.float32, torch.device("cpu"))
    parts: list[Any] = [Int8.of(torch.randn(32, 64)), Dense(torch.randn(8, 64)), Fp8.of(torch.randn(20, 64))]
    products = PromptProducts()
    made: Any = products.of(linear(side_by_side(parts), workspaces))
    assert [type(part).__name__ for part in made.parts] == ["DeviceByKind", "DeviceDense", "DeviceQuantized"]
    x = torch.randn(40, 64)
    before = made(x)
    products.step = module.StepRows(10)
    rounded = made(x)
    assert torch.equal(rounded[:, 32:], before[:, 32:])
    torch.testing.assert_close(rounded[:10], before[:10], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(rounded[10:, :32], before[10:, :32], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [None, "int4"])
def test_a_model_without_weights_of_8_bits_is_refused(method: str | None, folder: Callable[..., Path]) -> None:
    config = config_of(folder(), block_size=64, quantization=method, quantization_twin=True)
    told = f"quantization_twin=True: on CUDA, .* Qwen3ForCausalLM with quantization={method!r} has no such layer"
    with pytest.raises(UnsupportedModelError, match=told):
        CudaRunner(config, show_progress=False, device=HostDevice()).load()


@pytest.mark.parametrize("method", ["int8", "fp8", "compressed-tensors", "torchao", "modelopt"])
def test_methods_of_8_bits_may_have_them(method: str) -> None:
    given = dict(DEFAULTS) | {"device": "cuda", "quantization": method, "quantization_twin": True}
    assert rules_of("cuda").why_not(given, pools=False) is None
