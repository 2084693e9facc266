"""Drivers of runners that have loaded a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from tests.model.cuda.conftest import config_of
from tests.model.cuda.twins import DeviceDriver
from tests.model.driver import Driver


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
