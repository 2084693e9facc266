"""Drivers of runners that have loaded a model's folder, and steps of theirs whose logits are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from tests.model.cuda.conftest import config_of
from tests.model.cuda.twins import DeviceDriver
from tests.model.driver import Driver
from tests.model.hf.decoders import TOLERANCE, difference, prompt, reference


def cpu_driver(folder: Path, plan: Any = None, **arguments: Any) -> Driver:
    config = config_of(folder, block_size=4, load_format="auto", **arguments)
    runner = CpuRunner(config, show_progress=False, plan=plan)
    runner.load()
    runner.allocate(64)
    return Driver(runner)


def device_driver(
    folder: Path, kind: type[CudaRunner] = CudaRunner, plan: Any = None, **arguments: Any
) -> DeviceDriver:
    config = config_of(folder, block_size=64, load_format="auto", **arguments)
    runner = kind(config, show_progress=False, device=HostDevice(), plan=plan)
    runner.load()
    runner.allocate(24)
    return DeviceDriver(runner, num_blocks=24)


def chunks_and_decode_steps(driver: Any, model: Any) -> None:
    """A prompt in chunks beside another one that decodes, then both; every row of every step is compared."""
    runner = driver.runner
    on_device = isinstance(runner, CudaRunner)
    if on_device:
        runner.model.head = None  # so that logits are written

    def step(*arguments: Any, **more: Any) -> None:
        driver.step(*arguments, **more)
        if on_device:
            driver.logits = runner.sampler.logits[: len(driver.rows)].clone()
        assert difference(driver, model) < TOLERANCE

    assert float(reference(model, prompt(1, 70)).std()) > 1.0, "the logits do not matter"
    driver.add(0, prompt(1, 70))
    driver.add(3, prompt(2, 5))
    step({0: 40, 3: 5}, decode=[])
    step({0: 30}, decode=[3])
    for _ in range(6):
        step(decode=[3, 0])
