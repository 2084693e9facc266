"""Whether 8 bits pay here is measured when a quantized model is loaded, said, and decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actorllm.model.cpu import runner as cpu_runner
from actorllm.model.linear import Linear
from actorllm.model.quantization import speed
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import Int8Linear
from actorllm.model.quantization.speed import Speed, measured


class Clock:
    """Moves when a product is computed."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed(Linear):
    """Takes so long for a row."""

    def __init__(self, clock: Clock, num_seconds: float) -> None:
        super().__init__(1, 1, 1)
        self.clock, self.num_seconds = clock, num_seconds

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.num_seconds * len(x)
        return x


@pytest.mark.parametrize(("plain", "quantized", "is_slower"), [(3.0, 1.0, False), (1.0, 2.0, True)])
def test_the_sides_are_timed_by_the_same_clock(
    plain: float, quantized: float, is_slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    found = measured(8, 4, torch.float32, lambda y: Timed(clock, quantized if isinstance(y, Int8) else plain))
    assert found == Speed(plain / quantized, plain / quantized)
    assert found.is_slower == is_slower


@pytest.mark.parametrize("found", [Speed(0.5, 0.9), Speed(0.9, 1.2)])
def test_a_slow_processor_is_told_and_computes_as_configured(
    found: Speed, make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_runner, "measured", lambda *_: found)
    with caplog.at_level(logging.INFO):
        decoder = make_driver("storyteller", quantization="int8").runner.decoder
    told = [record for record in caplog.records if "of 8 bits" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING if found.is_slower else logging.INFO]
    assert f"{found.decode:.2f} times as fast" in told[0].message
    assert isinstance(decoder.lm_head, Int8Linear)
