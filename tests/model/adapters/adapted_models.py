"""Drivers of models with adapters, and the logits of their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from actorllm.model.cpu.runner import CpuRunner
from actorllm.types.adapter_folder import AdapterDigests
from tests.model.driver import Driver
from tests.model.families.loaded import cpu_driver
from tests.model.hf.decoders import reference


def adapted_driver(folder: Path, **arguments: Any) -> Driver:
    return cpu_driver(folder, **({"enable_lora": True, "max_loras": 4, "max_lora_rank": 8} | arguments))


def put(runner: CpuRunner, slot: int, folder: Path) -> None:
    adapters = runner.adapters
    assert adapters is not None
    adapter = AdapterDigests(max_rank=8).adapter_of(str(folder))
    adapters.put(slot, adapter.digest, adapters.read(adapter))


def last_logits(driver: Driver, rows: dict[int, tuple[list[int], int]]) -> dict[int, torch.Tensor]:
    """Of each row's last token, prefilled but for one token and then decoded, all in one batch. rows: tokens and adapter."""
    for slot, (tokens, adapter) in rows.items():
        driver.add(slot, tokens, adapter_id=adapter)
    driver.step(dict.fromkeys(rows, 5), decode=[])
    driver.step({slot: len(tokens) - 5 for slot, (tokens, _) in rows.items()})
    assert driver.logits is not None
    found = {slot: row.clone() for slot, row in zip(rows, driver.logits, strict=True)}
    driver.step(decode=list(rows))
    assert driver.logits is not None
    return {slot: torch.stack((found[slot], row)) for slot, row in zip(rows, driver.logits, strict=True)}


def expected(model: Any, driver: Driver, slot: int, length: int) -> torch.Tensor:
    """Of the same two tokens."""
    return reference(model, driver.requests[slot].tokens[: length + 1])[-2:]
