"""The oracle of quantized weights on a device: the same weights in plain numbers, and steps that both make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from actorllm.model.cpu.scheme import Scheme
from actorllm.model.linear import Form, Linear, LinearPart, LinearWeight
from actorllm.model.linear.by_kind import ByKindLinear, RowKinds
from actorllm.model.linear.dense import Dense
from actorllm.model.parallel import Ranks
from actorllm.model.quantization.grouped import nearest
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.int8 import Int8
from actorllm_kernels import reference
from tests.model.cuda.twins import TINY, Twins, prompt


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

    def sharded(self, weights: Any, part: LinearPart) -> LinearWeight:
        return dense(self.form.sharded(weights, part))

    def fused(self, parts: Sequence[Any]) -> LinearWeight:
        return Dense.fused(parts)


class DequantizedByRank(Dequantized):
    """The same, rounded as so many ranks do: the inputs of a layer whose sums they share are rounded part by part."""

    def __init__(self, form: Form, num_ranks: int) -> None:
        super().__init__(form)
        self.num_ranks = num_ranks

    def sharded(self, weights: Any, part: LinearPart) -> LinearWeight:
        if not part.name.endswith(("o_proj", "down_proj")):
            return super().sharded(weights, part)
        columns = [Ranks(rank, self.num_ranks).part(part.in_features) for rank in range(self.num_ranks)]
        parts = [dense(self.form.sharded(weights, part._replace(columns=one))) for one in columns]
        return Dense(torch.cat([one.weight.float() for one in parts], 1), parts[0].bias)


class Rounded(Linear):
    """The product of rows that are rounded to 8 bits, in float64; by several ranks each part of the inputs by itself."""

    def __init__(self, weight: Dense, kind: torch.dtype, num_ranks: int = 1) -> None:
        super().__init__(weight.out_features, weight.in_features, weight.num_bytes)
        self.weight, self.kind = weight, kind
        is_shared_out = weight.in_features != TINY["hidden_size"]
        self.ranks = [Ranks(rank, num_ranks) for rank in range(num_ranks)] if is_shared_out else [Ranks()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = [ranks.part(self.in_features) for ranks in self.ranks]
        y = torch.stack([self.part(x[:, part], self.weight.weight[:, part]) for part in parts]).sum(0)
        return (y if self.weight.bias is None else y + self.weight.bias.double()).to(x.dtype)

    def part(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        codes, factors = reference.quantized_rows(x.float(), self.kind)
        numbers = reference.float8_numbers(codes) if self.kind == torch.uint8 else codes.float()
        return (numbers.double() * factors.double()) @ weight.double().T


def rounds_prompts(module: Any, kind: torch.dtype, num_ranks: int = 1) -> None:
    """Let the CPU's runner, of this module, compute rows of prompts like that."""

    def products(
        scheme: Scheme, dtype: torch.dtype, kinds: RowKinds, make: Callable[[LinearWeight], Linear]
    ) -> Callable[[Any], Linear]:
        return lambda weight: ByKindLinear(make(weight), Rounded(weight, kind, num_ranks), kinds)

    module.choose, module.products = lambda *_: Scheme("w8a16", "w8a8"), products


def follow_kinds(twins: Twins) -> None:
    """Output that is computed once more: in a chunk with one token of it, and whole."""
    twins.add(6, [*prompt(40, 5), 3, 4], num_outputs=2)
    twins.step({6: 41}, decode=[1])
    twins.step({6: 1}, decode=[1])
    twins.step(decode=[6, 1])
    twins.add(5, [*prompt(11, 4), *twins.tokens(0)[80:84]], num_outputs=4)
    twins.step({5: 15}, decode=[0, 1])


def follow(twins: Twins) -> None:
    """Prompts of few rows and of many, a chunk beside decode rows, and decode steps of several sizes."""
    size = twins.runner.model.vocab_size

    def tokens(length: int, seed: int) -> list[int]:
        return [token % size for token in prompt(length, seed)]

    twins.add(0, tokens(80, 1), temperature=0.8, seed=7)
    twins.step({0: 70}, decode=[])
    twins.add(1, tokens(9, 2))
    twins.step({0: 10, 1: 9})
    twins.add(2, tokens(75, 3), temperature=1.0, seed=5, top_p=0.7)
    twins.step({2: 75}, decode=[0, 1])
    for _ in range(4):
        twins.step(decode=[0, 1, 2])
