"""Weights and activations of 8 bits: exact sums of integers, rows that depend on nothing but themselves, small errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu.layers import linear
from actorllm.model.linear import LinearPart
from actorllm.model.quantization import onednn
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import Int8Linear
from actorllm.model.weights import DummyWeights


def random_int8(num_outputs: int, num_inputs: int, has_bias: bool = True) -> tuple[torch.Tensor, Int8]:
    weight = torch.randn(num_outputs, num_inputs) * torch.rand(num_outputs, 1)
    return weight, Int8.of(weight, torch.randn(num_outputs) if has_bias else None)


def by_integers(x: torch.Tensor, weight: Int8) -> torch.Tensor:
    """The definition in integers of 64 bits, and float32 for the scales."""
    scale = x.float().abs().amax(1, keepdim=True) / 127
    activations = (x.float() * (1 / scale) + 128.5).floor().long() - 128
    sums = activations @ weight.codes.long().T
    out = (sums.float() * weight.scales) * scale
    return (out if weight.bias is None else out + weight.bias).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(7, 12), (33, 65), (320, 128), (960, 576)])
def test_a_product_is_that_of_the_integers(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    """Bit by bit, for one row, for several and for many; the statement in plain torch as well."""
    _, weight = random_int8(num_outputs, num_inputs)
    made = linear(weight)
    assert isinstance(made, Int8Linear)
    for num_rows in (1, 2, 5, 16, 70):
        x = (torch.randn(num_rows, num_inputs) * torch.rand(num_rows, 1) * 9).to(dtype)
        expected = by_integers(x, weight)
        assert torch.equal(made(x), expected)
        assert torch.equal(weight(x), expected)
    assert (made.in_features, made.out_features, made.num_bytes) == (num_inputs, num_outputs, weight.num_bytes)
    assert weight.num_bytes == num_outputs * (num_inputs + 4)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    made = linear(random_int8(96, 200)[1])
    x = torch.randn(130, 200)
    x[1:] *= 1000.0
    alone = made(x[:1])
    for num_rows in (2, 3, 4, 8, 17, 64, 130):
        assert torch.equal(made(x[:num_rows])[:1], alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so_and_alone(bad: float) -> None:
    made, x = linear(random_int8(20, 64)[1]), torch.randn(3, 64)
    expected = made(x)
    x[1, 5] = bad
    found = made(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_rows_and_weights_of_zeros_give_the_bias() -> None:
    weight = Int8.of(torch.zeros(5, 16), torch.arange(5.0))
    assert torch.equal(linear(weight)(torch.randn(2, 16)), torch.arange(5.0).expand(2, 5))
    _, weight = random_int8(5, 16)
    assert weight.bias is not None
    assert torch.equal(linear(weight)(torch.zeros(2, 16)), weight.bias.expand(2, 5))


def test_weights_are_rounded_to_the_nearest_code(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rounded = random_int8(40, 64)
    error = (rounded.codes * rounded.scales[:, None] - weight).abs()
    assert (error <= 0.5001 * rounded.scales[:, None]).all()
    assert (rounded.codes.abs().amax(1) == 127).all(), "the scales leave no code unused"
    monkeypatch.setattr("actorllm.model.quantization.per_output.SLICE_NUMBERS", 64 * 7)
    in_slices = Int8.of(weight)
    assert torch.equal(in_slices.codes, rounded.codes)
    assert torch.equal(in_slices.scales, rounded.scales)


def test_parts_are_those_of_the_whole() -> None:
    weights, x = DummyWeights(0, torch.float32), torch.randn(5, 12)
    whole = Int8.sharded(weights, LinearPart("a", 8, 12, has_bias=True))
    rows = [Int8.sharded(weights, LinearPart("a", 8, 12, rows=slice(i, i + 4), has_bias=True)) for i in (0, 4)]
    assert torch.equal(Int8.fused(rows)(x), whole(x))
    assert Int8.fused(rows[:1]) is rows[0]
    order = torch.randperm(8)
    assert torch.equal(whole.reordered(order)(x), whole(x)[:, order])
    assert whole.bias is not None
    torch.testing.assert_close(whole.without_bias()(x) + whole.bias, whole(x))
    columns = [Int8.sharded(weights, LinearPart("a", 8, 12, columns=slice(i, i + 6))) for i in (0, 6)]
    split = columns[0](x[:, :6]) + columns[1](x[:, 6:])
    assert (split - whole.without_bias()(x)).square().mean().sqrt() < 0.03 * whole(x).std(), "each has its own scales"


def test_a_processor_that_cuts_sums_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without VNNI does, which adds pairs of products in 16 bits."""
    right = onednn.product
    _, weight = random_int8(4, 8)

    def cut_off(*arguments: Any) -> torch.Tensor:
        return right(*arguments).clamp_max_(512 * 127 * 127 / 2)

    monkeypatch.setattr(onednn, "product", cut_off)
    onednn.is_exact.cache_clear()
    try:
        with pytest.raises(UnsupportedModelError, match="not exact"):
            linear(weight)
    finally:
        monkeypatch.undo()
        onednn.is_exact.cache_clear()
    linear(weight)
