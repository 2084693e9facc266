"""The seam for weights: what a form of weight must be able to do, and that models hold nothing but that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu import layers
from actorllm.model.cuda.linear import DeviceDense
from actorllm.model.cuda.quantized import Workspaces
from actorllm.model.cuda.quantized import linear as device_linear
from actorllm.model.linear import Linear, LinearPart
from actorllm.model.linear.dense import Dense, joined
from actorllm.model.weights import DummyWeights

on_device = partial(device_linear, workspaces=Workspaces(torch.float32, torch.device("cpu")))
X = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))


def random_dense(num_outputs: int, has_bias: bool = True) -> Dense:
    return Dense(torch.randn(num_outputs, 12), torch.randn(num_outputs) if has_bias else None)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("backend", [layers.linear, on_device])
def test_every_backend_computes_the_product(backend: Callable[[Any], Linear], has_bias: bool) -> None:
    dense = random_dense(7, has_bias)
    made = backend(dense)
    torch.testing.assert_close(made(X), torch.nn.functional.linear(X, dense.weight, dense.bias))
    assert (made.in_features, made.out_features, made.num_bytes) == (12, 7, 7 * 12 * 4)


def test_matrices_that_lie_one_behind_the_other_are_joined_without_a_copy() -> None:
    memory = torch.arange(60.0)
    first, second, third = memory[:12].view(3, 4), memory[12:20].view(2, 4), memory[20:60].view(10, 4)
    whole = joined([first, second, third])
    assert whole.data_ptr() == memory.data_ptr()
    assert torch.equal(whole, memory.view(15, 4))
    assert torch.equal(joined([second, third]), memory[12:].view(12, 4))
    for parts in (
        [second, first],  # in another order
        [first, third],  # with something between
        [first, second.clone()],
        [first, memory[12:20].view(4, 2).T],  # in its place, but not row by row
        [first, memory.view(torch.int32)[12:20].view(2, 4)],
    ):
        made = joined(parts)
        assert torch.equal(made, torch.cat(parts))
        assert made.data_ptr() not in {part.data_ptr() for part in parts}


def test_fused_and_reordered_products_are_those_of_the_parts() -> None:
    parts = [random_dense(3), random_dense(4), random_dense(2)]
    fused = Dense.fused(parts)
    torch.testing.assert_close(fused(X), torch.cat([part(X) for part in parts], 1))
    order = torch.randperm(9)
    torch.testing.assert_close(fused.reordered(order)(X), fused(X)[:, order])
    torch.testing.assert_close(fused.without_bias()(X), X @ fused.weight.T)
    assert Dense.fused(parts[:1]) is parts[0]


def test_shares_of_ranks_are_the_whole() -> None:
    weights = DummyWeights(0, torch.float32)
    whole = Dense.sharded(weights, LinearPart("a", 8, 12, has_bias=True))
    rows = [Dense.sharded(weights, LinearPart("a", 8, 12, rows=slice(i, i + 4), has_bias=True)) for i in (0, 4)]
    torch.testing.assert_close(Dense.fused(rows)(X), whole(X))
    columns = [Dense.sharded(weights, LinearPart("a", 8, 12, columns=slice(i, i + 6))) for i in (0, 6)]
    torch.testing.assert_close(columns[0](X[:, :6]) + columns[1](X[:, 6:]), whole.without_bias()(X))


def test_a_device_writes_where_it_is_told() -> None:
    made, out = on_device(random_dense(7)), torch.empty(5, 7)
    assert isinstance(made, DeviceDense)
    assert made(X, out) is out
    wide = torch.empty(5, 7)
    made.wide(X, wide)
    torch.testing.assert_close(wide + made.bias, out)


@pytest.mark.parametrize(("backend", "where"), [(layers.linear, "the CPU"), (on_device, "CUDA")])
def test_a_form_that_a_backend_does_not_know_is_refused_by_name(backend: Callable[[Any], Linear], where: str) -> None:
    class Packed(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(UnsupportedModelError, match=f"weights of the form Packed are not supported on {where}"):
        backend(Packed(7, 12, 0))
