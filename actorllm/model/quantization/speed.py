"""Whether products of quantized weights are faster here than those of the model's type.

Processors differ, and so does what else they do.
Measured when a quantized model is loaded, by weights of the shape of its largest layers. It decides nothing: the configuration
says what is computed, so that a worker that takes another's place computes the same bits. It is said in the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from actorllm.model.linear import Form, Linear, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.int8 import Int8

ROWS = (1, 64)
"""Of a decode step, and of part of a prompt."""

ROUNDS = 7

MOST_NUMBERS = 4 << 20
"""Of the weight that is measured: more take longer and say the same."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as fast products of quantized weights are."""

    decode: float
    prompt: float

    @property
    def is_slower(self) -> bool:
        """At everything."""
        return max(self.decode, self.prompt) < 1


def measured(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, linear: Callable[[LinearWeight], Linear], form: Form = Int8
) -> Speed:
    """Of a layer of this size; both are timed in turns, and the shortest time of each counts.

    linear: makes the products of a weight, as the model's are made. form: what the weights are rounded to.
    """
    num_outputs = max(1, min(num_outputs, MOST_NUMBERS // num_inputs))
    weight = torch.full((num_outputs, num_inputs), 0.5, dtype=dtype)
    sides = (linear(Dense(weight)), linear(form.of(weight)))
    found = []
    for num_rows in ROWS:
        x = torch.ones(num_rows, num_inputs, dtype=dtype)
        times = [float("inf")] * len(sides)
        for _ in range(ROUNDS):
            for i, side in enumerate(sides):
                began = time.perf_counter()
                side(x)
                times[i] = min(times[i], time.perf_counter() - began)
        found.append(times[0] / times[1])
    return Speed(*found)
