"""The oracle of quantized weights on a device: the same weights in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from actorllm.model.linear import Form, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.grouped import nearest
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.int8 import Int8


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
