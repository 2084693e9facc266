"""The oracle of quantized weights on a device: the same weights in plain numbers, and steps that both make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from actorllm.model.linear import Form, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.grouped import nearest
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.int8 import Int8
from tests.model.cuda.twins import Twins, prompt


def dense(weight: Any) -> Dense:
    """The oracle: the weight in plain numbers."""
    if isinstance(weight, Int4) and weight.order is not None:
        weight = nearest(weight.dense(), weight.bias, torch.float32)
    if isinstance(weight, Int8):
        return Dense(weight.codes.float() * weight.scales.unsqueeze(1), weight.bias)
    return weight if isinstance(weight, Dense) else Dense(weight.dense(), weight.bias)


class Dequantized:
    """A form whose layers are dequantized as soon as they are read."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return dense(self.form.of(weight, bias))

    def head_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return dense(self.form.head_of(weight, bias))

    def sharded(self, *args: Any, **kwargs: Any) -> LinearWeight:
        return dense(self.form.sharded(*args, **kwargs))

    def fused(self, parts: Sequence[Any]) -> LinearWeight:
        return Dense.fused(parts)


def follow(twins: Twins) -> None:
    """Prompts of few rows and of many, a chunk beside decode rows, and decode steps of several sizes."""
    twins.add(0, prompt(80, 1), temperature=0.8, seed=7)
    twins.step({0: 70}, decode=[])
    twins.add(1, prompt(9, 2))
    twins.step({0: 10, 1: 9})
    twins.add(2, prompt(75, 3), temperature=1.0, seed=5, top_p=0.7)
    twins.step({2: 75}, decode=[0, 1])
    for _ in range(4):
        twins.step(decode=[0, 1, 2])
