"""Mixtures of experts on a device: streams are those of the CPU worker (float32), in recorded steps and launched ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.cuda import experts, ops
from actorllm.model.cuda.experts import StackedWeights
from actorllm.model.cuda.quantized import Workspaces
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.linear.dense import Dense
from tests.effort import each_value
from tests.model.adapters.lora_folders import write_adapter
from tests.model.cuda.adapted import LORA, put
from tests.model.cuda.conftest import config_of
from tests.model.cuda.mixtures import FAMILIES, QWEN3, follow
from tests.model.cuda.twins import Twins, prompt
from tests.model.mxfp4_folders import save_mxfp4


@pytest.mark.parametrize(("is_recorded", "family"), each_value([True, False], list(FAMILIES)))
def test_streams_are_those_of_the_cpu_worker(family: str, is_recorded: bool, make_twins: Callable[..., Twins]) -> None:
    twins = make_twins(FAMILIES[family], enforce_eager=not is_recorded)
    while is_recorded and twins.runner.record_next():
        pass
    follow(twins)
    assert (twins.runner.graphs.num_launched == 0) == is_recorded


def test_layers_with_and_without_experts(make_twins: Callable[..., Twins]) -> None:
    follow(make_twins(QWEN3 | {"mlp_only_layers": [1], "norm_topk_prob": False}))


def test_many_tokens_go_through_the_experts_in_pieces(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "PIECE_TOKENS", 16)
    follow(make_twins(QWEN3))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_rounded_experts(method: str, folder: Callable[..., Path], make_quantized: Callable[..., Twins]) -> None:
    path = folder(**QWEN3 | {"moe_intermediate_size": 64})
    follow(make_quantized(path, quantization=method))


def test_experts_in_mxfp4(tmp_path: Path, make_runner: Callable[..., CudaRunner]) -> None:
    """Read to floats, as on the CPU."""
    path, _ = save_mxfp4(tmp_path)
    cpu = CpuRunner(config_of(path, block_size=16, load_format="auto"), show_progress=False)
    cpu.load()
    cpu.allocate(96)
    follow(Twins(cpu, make_runner(path, load_format="auto")))


def test_adapters_beside_experts(tmp_path: Path, make_twins: Callable[..., Twins]) -> None:
    twins = make_twins(QWEN3, **LORA)
    write_adapter(tmp_path / "one", {"model.layers.0.self_attn.q_proj": (128, 64)}, seed=1, size=1.0)
    for runner in (twins.cpu_runner, twins.runner):
        put(runner, 1, tmp_path / "one")
    twins.add(0, prompt(20, 1), adapter_id=1)
    twins.add(1, prompt(20, 1))
    twins.step({0: 20, 1: 20})
    for _ in range(4):
        twins.step(decode=[0, 1])
    assert twins.tokens(0) != twins.tokens(1)


def test_a_decode_step_reads_the_experts_that_its_rows_have_chosen_and_padding_chooses_none(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    operation = ops.OPERATIONS["grouped_gemm"]

    def noted(
        x: Any, weight: Any, scales: Any, bias: Any, order: Any, starts: torch.Tensor, *more: Any, **kw: Any
    ) -> None:
        read.append(int(starts.diff().count_nonzero()))
        on_host(x, weight, scales, bias, order, starts, *more, **kw)

    on_host = operation.on_host
    monkeypatch.setattr(operation, "on_host", noted)
    twins = make_twins(QWEN3)
    for slot in range(3):
        twins.add(slot, prompt(5 + slot, slot))
    twins.step({0: 5, 1: 6, 2: 7})
    read.clear()
    twins.step(decode=[0])
    assert set(read) == {3}
    read.clear()
    twins.step(decode=[0, 1, 2])  # launched as a step of four rows
    assert max(read) <= 8


def test_states_that_are_no_numbers_void_their_own_row_only(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins(QWEN3)
    twins.add(0, prompt(20, 1))
    twins.add(1, prompt(20, 2))
    twins.step({0: 20, 1: 20})
    with torch.inference_mode():
        for runner in (twins.cpu_runner, twins.runner):
            runner.model.embedding[twins.tokens(1)[-1]] = torch.nan
    result = twins.step(decode=[0, 1])
    assert result.nonfinite_rows.tolist() == [1]
    assert np.isfinite(twins.tokens(0)).all()


def test_experts_of_several_forms_are_refused(make_runner: Callable[..., CudaRunner]) -> None:
    stacked, workspaces = StackedWeights(2), Workspaces(torch.float32, torch.device("cpu"))
    stacked.add(Dense(torch.zeros(4, 8)), workspaces)
    with pytest.raises(UnsupportedModelError, match="weights have several forms"):
        stacked.add(Dense(torch.zeros(4, 8), torch.zeros(4)), workspaces)
