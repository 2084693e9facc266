"""Steps on a device that is late give the tokens of the CPU worker: nothing is read before it is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm import LLM
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.messages import StepPlan
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.cuda.runner import CudaHandle, CudaRunner
from tests.effort import examples
from tests.model.cuda.conftest import config_of
from tests.model.cuda.delayed_device import POISON, DelayedDevice, DelayedDownload
from tests.model.cuda.host_engine import ARGUMENTS, CountingRunner, generate
from tests.model.cuda.rules import rules_of
from tests.model.cuda.twins import Twins, prompt

pytestmark = pytest.mark.timeout(120)


def late_twins(folder: Callable[..., Path], seed: int, **arguments: Any) -> Twins:
    path = folder()
    cpu = CpuRunner(config_of(path, block_size=16), show_progress=False)
    cpu.load()
    cpu.allocate(96)
    device = DelayedDevice(seed)
    runner = CudaRunner(config_of(path, block_size=64, **arguments), show_progress=False, device=device)
    runner.load()
    runner.allocate(24)
    device.is_late = True
    return Twins(cpu, runner)


@pytest.mark.parametrize("seed", range(examples(2, 40)))
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_tokens_are_those_of_the_cpu(folder: Callable[..., Path], enforce_eager: bool, seed: int) -> None:
    twins = late_twins(folder, seed, enforce_eager=enforce_eager)
    twins.add(0, prompt(70, 1))
    twins.add(3, prompt(5, 2), temperature=0.8, seed=2**63 + 5)
    twins.step({0: 60, 3: 5}, decode=[])
    twins.step({0: 10}, decode=[3])
    twins.add(1, prompt(20, 3), temperature=1.2, seed=7, top_k=20, top_p=0.9)
    twins.step({1: 20}, decode=[3, 0])
    twins.step(decode=[3, 0, 1])
    twins.remove(3)
    twins.add(2, prompt(9, 4), temperature=1.0, seed=5)
    twins.step(
        {2: 9}, decode=[0, 1], **rules_of(2, repetition_penalty=1.5, num_logprobs=2, allowed_ids=tuple(range(200)))
    )
    twins.step(decode=[0, 1, 2])
    for _ in range(3):
        twins.step()
    assert twins.runner.device.num_done > 0  # type: ignore[attr-defined]


def late_device(seed: int) -> DelayedDevice:
    device = DelayedDevice(seed)
    device.is_late = True
    return device


def test_what_is_read_too_early_is_poison() -> None:
    device = late_device(0)
    with device.active():
        x = device.upload(np.array([1.0, 2.0], np.float32))
        y = x * 2
        download = device.download([y])
    if not download.is_done:
        assert bool(torch.isnan(y).all())
    assert download.wait()[0].tolist() == [2.0, 4.0]


def test_a_value_that_is_read_inside_of_a_step_is_an_error() -> None:
    device = late_device(0)
    with pytest.raises(RuntimeError, match="reads a value inside of a step"), device.active():
        device.upload(np.array([1], np.int32)).item()


def test_an_array_may_change_behind_its_upload() -> None:
    device, array = late_device(1), np.array([1, 2], np.int32)
    with device.active():
        download = device.download([device.upload(array)])
        array[:] = POISON
    assert download.wait()[0].tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(examples(2, 40)))
def test_a_step_that_is_launched_ahead(folder: Callable[..., Path], seed: int) -> None:
    """The next step is launched before the host knows a token of this one, and results are fetched one step behind."""
    twins = late_twins(folder, seed)
    twins.add(0, prompt(40, 1))
    twins.add(1, prompt(7, 2), temperature=0.9, seed=3)
    twins.step({0: 40, 1: 7}, decode=[])
    runner, decode = twins.runner, np.array([0, 1], np.int32)
    handles = [runner.execute(StepPlan(step=step, decode_slots=decode if step == 10 else None)) for step in (10, 11)]
    found = []
    for step in range(12, 20):
        found.append(runner.finish(handles.pop(0)).tokens.tolist())
        handles.append(runner.execute(StepPlan(step=step)))
    expected = [twins.cpu.step(decode=[0, 1] if i == 0 else None).tokens.tolist() for i in range(8)]
    assert found == expected


def test_a_host_that_does_not_wait_is_found(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    twins = late_twins(folder, 0)
    twins.add(0, prompt(40, 1))
    monkeypatch.setattr(DelayedDownload, "wait", lambda self: [copy.numpy() for copy in self._copies])
    with pytest.raises(AssertionError):
        twins.step({0: 40}, decode=[])


class LateRunner(CountingRunner):
    """Its device is late from the first step on."""

    def execute(self, plan: StepPlan) -> CudaHandle:
        self.device.is_late = True  # type: ignore[attr-defined]
        return super().execute(plan)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(examples(1, 20)))
@pytest.mark.parametrize(
    "arguments", [{}, {"max_num_batched_tokens": 32, "enforce_eager": True}, {"kv_cache_memory_bytes": 5 * 65536}]
)
def test_an_engine_gives_the_streams_of_the_cpu(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], seed: int
) -> None:
    """Launching ahead, with prompts in chunks, and with so small a cache that requests give way to each other."""
    path, devices = folder(), []

    def load(self: WorkerActor, config: EngineConfig) -> CudaRunner:
        devices.append(DelayedDevice(seed))
        runner = LateRunner(config, self.rank, show_progress=False, device=devices[-1])
        runner.load()
        return runner

    def streams(**more: Any) -> list[Any]:
        with LLM(str(path), **(ARGUMENTS | more)) as llm:
            return generate(llm)

    expected = streams()
    monkeypatch.setattr(WorkerActor, "_load", load)
    assert streams(**arguments) == expected
    assert devices[-1].num_done > 200, "launches that waited in the queue"
