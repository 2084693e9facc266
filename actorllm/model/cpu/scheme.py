"""What the products of a model are computed as: a scheme for decode rows, and perhaps another for rows of prompts.

The fastest is found out when an engine starts for the first time. Products of one size are measured for all models, so that the
processor decides and not the model. The resolved configuration keeps it (`ModelConfig.scheme`), and recordings say it. A worker
that takes another's place computes the same bits. Processors are told apart by what they take, not by names of instructions.

A scheme is "int8", "int4", "bfloat16" or "float32". Two are written "int4+int8": of decode rows, and of prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from actorllm.model.cpu.layers import WidenedLinear, linear, widens
from actorllm.model.linear import Form, Linear, LinearWeight
from actorllm.model.linear.by_kind import ByKindLinear, RowKinds
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import SideBySide, SideBySideLinear
from actorllm.model.quantization.grouped import nearest
from actorllm.model.quantization.int4 import Int4, Int4Weights
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import is_exact

ROWS = (1, 64)
"""Of a decode step, and of part of a prompt."""

SHAPE = (2048, 1024)
"""Outputs and inputs of the weight that is measured."""

ROUNDS = 5

EVICTED_BYTES = 64 << 20
"""Read before a product of one row: in a decode step, weights come from memory and not from a cache."""

MIN_GAIN = 1.25
"""Times as fast: what takes more memory than what was asked for must be."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """See the module docstring."""

    decode: str
    prompt: str

    def __str__(self) -> str:
        return self.decode if self.decode == self.prompt else f"{self.decode}+{self.prompt}"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        decode, _, prompt = text.partition("+")
        return cls(decode, prompt or decode)


def product_times(sides: Sequence[Linear], dtype: torch.dtype) -> list[tuple[float, ...]]:
    """Of each side the seconds of a product, by `ROWS`; taken in turns, and the shortest counts."""
    found = [[float("inf")] * len(ROWS) for _ in sides]
    other = torch.ones(EVICTED_BYTES // 4)
    for at, num_rows in enumerate(ROWS):
        x = torch.ones(num_rows, sides[0].in_features, dtype=dtype)
        for _ in range(ROUNDS):
            for times, side in zip(found, sides, strict=True):
                if num_rows == 1:
                    side(x)  # kernels are made in the first call
                    other.sum()
                began = time.perf_counter()
                side(x)
                times[at] = min(times[at], time.perf_counter() - began)
    return [tuple(times) for times in found]


def measured(dtype: torch.dtype, form: Form, *, may_twin: bool) -> tuple[Scheme, str]:
    """The fastest scheme here, and in words what was found.

    Arguments:
        dtype: of the model.
        form: what plain weights are rounded to; `Dense`: they are not.
        may_twin: rows of prompts may have a scheme of their own, which keeps every weight twice.
    """
    plain = "float32" if widens(dtype) else str(dtype).removeprefix("torch.")
    if form is not Dense and not is_exact():
        return Scheme(plain, plain), "sums of 8 bits are not exact: this processor has no VNNI"
    weight = torch.full(SHAPE, 0.5, dtype=dtype)
    sides: dict[str, Linear] = {plain: linear(Dense(weight))}
    if form is Dense:
        if plain != "bfloat16":
            return Scheme(plain, plain), ""
        sides["float32"] = WidenedLinear(weight)
    elif isinstance(form, Int4Weights):
        sides["int4"] = linear(form.of(weight))
        if may_twin:
            sides["int8"] = linear(Int8.of(weight))
    else:
        sides["int8"] = linear(form.of(weight))
    times = dict(zip(sides, product_times(list(sides.values()), dtype), strict=True))
    told = ", ".join(
        f"{name} {times[plain][0] / one:.2f} and {times[plain][1] / many:.2f}"
        for name, (one, many) in times.items()
        if name != plain
    )
    told = f"times as fast as {plain}, for one row and for prompts: {told}"
    return _fastest(times, plain, may_twin), told


def _fastest(times: dict[str, tuple[float, ...]], plain: str, may_twin: bool) -> Scheme:
    (one, many) = times[plain]
    if "int4" in times:
        if times["int4"][0] > one and times["int4"][1] > many:
            return Scheme(plain, plain)
        twin = "int8" in times and times["int4"][1] >= MIN_GAIN * times["int8"][1]
        return Scheme("int4", "int8" if twin else "int4")
    if "int8" in times:
        return Scheme(plain, plain) if times["int8"][0] > one and times["int8"][1] > many else Scheme("int8", "int8")
    wide = times["float32"]
    decode = "float32" if one >= MIN_GAIN * wide[0] else plain
    prompt = "float32" if many >= MIN_GAIN * wide[1] else plain
    if decode != prompt and not (may_twin and decode == plain):
        decode = prompt = plain
    return Scheme(decode, prompt)


def products(
    scheme: Scheme, dtype: torch.dtype, kinds: RowKinds, make: Callable[[LinearWeight], Linear]
) -> Callable[[LinearWeight], Linear]:
    """What makes the products of a scheme. make: those of a weight as it is."""

    def of(weight: LinearWeight) -> Linear:
        if isinstance(weight, SideBySide):
            return SideBySideLinear([of(part) for part in weight.parts])
        if isinstance(weight, Dense) and weight.weight.dtype == torch.bfloat16:
            if scheme.decode == "float32":
                return WidenedLinear(weight.weight, weight.bias)
            if scheme.prompt == "float32":
                return ByKindLinear(make(weight), WidenedLinear(weight.weight, weight.bias), kinds)
        if isinstance(weight, Int4) and scheme.prompt == "int8":
            twin = nearest(weight.dense(), weight.bias, dtype)
            if isinstance(twin, Int8):  # else 8 bits would change the weight too much
                return ByKindLinear(make(weight), linear(twin), kinds)
        return make(weight)

    return of
