"""Weights of 4 bits: products of the dequantized weights, rows that depend on nothing but themselves, groups that ranks keep."""

from __future__ import annotations

import pytest
import torch

from actorllm.model.cpu.layers import linear
from actorllm.model.linear import LinearPart
from actorllm.model.linear.side_by_side import SideBySide, side_by_side
from actorllm.model.quantization import int4pack
from actorllm.model.quantization.int4 import Int4, Int4Weights, fitting
from actorllm.model.quantization.int4pack import Int4Linear
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import DummyWeights


def random_int4(num_outputs: int, num_inputs: int, group: int, is_ordered: bool = False) -> Int4:
    return Int4(
        torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8),
        torch.rand(num_outputs, num_inputs // group) / 10,
        torch.randn(num_outputs, num_inputs // group) / 10,
        torch.randn(num_outputs),
        torch.randperm(num_inputs) if is_ordered else None,
    )


def by_hand(x: torch.Tensor, weight: Int4) -> torch.Tensor:
    """The definition number by number, in float64."""
    scales, zeros = (y.double().repeat_interleave(weight.group, 1) for y in (weight.scales, weight.zeros))
    dense = (weight.codes.double() - 8) * scales + zeros
    seen = x.bfloat16().double()
    assert weight.bias is not None
    return (seen if weight.order is None else seen[:, weight.order]) @ dense.T + weight.bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "group"), [(7, 32, 32), (33, 128, 64), (320, 256, 128), (1100, 96, 32)]
)
def test_a_product_is_that_of_the_dequantized_weight(
    num_outputs: int, num_inputs: int, group: int, dtype: torch.dtype
) -> None:
    for is_ordered in (False, True):
        weight = random_int4(num_outputs, num_inputs, group, is_ordered)
        made = linear(weight)
        assert isinstance(made, Int4Linear)
        for num_rows in (1, 5, 70):
            x = torch.randn(num_rows, num_inputs).to(dtype)
            found, expected = made(x), by_hand(x, weight)
            assert found.dtype == dtype
            assert (found.double() - expected).norm() < 0.006 * expected.norm(), "products are rounded to bfloat16"
            torch.testing.assert_close(weight(x), found, rtol=0.02, atol=0.02)
        assert made.num_bytes == num_outputs * (num_inputs // 2 + 4 * num_inputs // group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_does_not_depend_on_its_neighbours(num_threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        made, x = linear(random_int4(200, 576, 32)), torch.randn(130, 576).to(dtype)
        alone = torch.cat([made(x[i : i + 1]) for i in range(130)])
        for num_rows in (*range(1, 20), 31, 32, 33, 64, 100, 130):
            assert torch.equal(made(x[:num_rows]), alone[:num_rows])
    finally:
        torch.set_num_threads(before)


def test_a_row_that_is_not_finite_stays_so_and_alone() -> None:
    made, x = linear(random_int4(20, 64, 32)), torch.randn(3, 64)
    expected = made(x)
    x[1, 5] = torch.nan
    found = made(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_are_rounded_to_the_nearest_code(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 256) * torch.rand(40, 1)
    rounded = Int4.of(weight, group=group)
    steps = rounded.scales.float().repeat_interleave(group, 1)
    assert ((rounded.dense() - weight).abs() <= 0.6 * steps).all()
    assert rounded.codes.max() == 15, "the scales leave no code unused"
    assert rounded.codes.min() == 0
    monkeypatch.setattr("actorllm.model.quantization.int4.SLICE_NUMBERS", 256 * 7)
    assert torch.equal(Int4.of(weight, group=group).dense(), rounded.dense())
    assert torch.equal(Int4.of(torch.zeros(3, group), group=group).dense(), torch.zeros(3, group))


def test_packed_in_slices_is_packed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_int4(200, 64, 32)
    whole = Int4Linear(weight).packed
    monkeypatch.setattr(int4pack, "SLICE_OUTPUTS", 64)
    assert torch.equal(Int4Linear(weight).packed, whole)


def test_parts_are_those_of_the_whole() -> None:
    """Ranks whose inputs end with a group have the same weights as one; others have smaller groups or 8 bits."""
    form, weights = Int4Weights(32), DummyWeights(0, torch.float32)
    whole = form.sharded(weights, LinearPart("a", 8, 128, has_bias=True))
    assert isinstance(whole, Int4)
    rows = [form.sharded(weights, LinearPart("a", 8, 128, rows=slice(i, i + 4), has_bias=True)) for i in (0, 4)]
    x = torch.randn(5, 128)
    assert torch.equal(form.fused(rows)(x), whole(x))
    order = torch.randperm(8)
    assert torch.equal(whole.reordered(order)(x), whole(x)[:, order])
    parts = [form.sharded(weights, LinearPart("a", 8, 128, columns=slice(i, i + 64))) for i in (0, 64)]
    assert torch.equal(torch.cat([part.dense() for part in parts if isinstance(part, Int4)], 1), whole.dense())
    narrow = Int4Weights(128).sharded(weights, LinearPart("a", 8, 128, columns=slice(0, 64)))
    assert isinstance(narrow, Int4)
    assert narrow.group == 64
    assert isinstance(form.sharded(weights, LinearPart("a", 8, 128, columns=slice(0, 48))), Int8)
    assert isinstance(form.sharded(weights, LinearPart("lm_head", 8, 128)), Int8)


def test_groups_divide_the_inputs() -> None:
    assert [fitting(128, size) for size in (128, 192, 96, 48, 16)] == [128, 64, 32, None, None]
    assert [fitting(32, size) for size in (128, 96)] == [32, 32]
    assert fitting(128, 256, 64) == 64


def test_layers_of_several_forms_are_side_by_side() -> None:
    weights = [torch.randn(size, 64) for size in (6, 2, 4)]
    parts = [Int4.of(weights[0]), Int4.of(weights[1]), Int8.of(weights[2])]
    made = side_by_side(parts)
    assert isinstance(made, SideBySide)
    assert [type(part) for part in made.parts] == [Int4, Int8]
    assert side_by_side(parts[:1]) is parts[0]
    x = torch.randn(3, 64)
    computed, apart = linear(made), torch.cat([linear(part)(x) for part in parts], 1)
    assert torch.equal(computed(x), apart)
    order = torch.cat((torch.randperm(8), 8 + torch.randperm(4)))
    assert torch.equal(linear(made.reordered(order))(x), apart[:, order])
    assert computed.num_bytes == sum(part.num_bytes for part in parts)
    other = random_int4(4, 64, 32, is_ordered=True)
    assert isinstance(side_by_side([parts[0], other]), SideBySide), "they read their inputs in other orders"
