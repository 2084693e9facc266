"""What this process computes with, in one line. Replicas that differ in it may round differently, and so sample other tokens."""

from __future__ import annotations

import platform

import torch

from actorllm.config import EngineConfig


def arithmetic_of(config: EngineConfig, scheme: str | None) -> str:
    """scheme: what products are computed as (`model.cpu.scheme`)."""
    version = torch.__version__.partition("+")[0]
    if config.device == "cpu":
        machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    elif config.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        machine = config.device
    ranks = f", {config.world_size} ranks" if config.world_size > 1 else ""
    return f"torch {version}, {machine}, {config.model.dtype}{'' if scheme is None else f' as {scheme}'}{ranks}"
