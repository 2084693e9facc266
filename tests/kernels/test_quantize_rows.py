"""Rows as codes of 8 bits, and sums of their products, against the references."""

from __future__ import annotations

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.quantize_rows import quantize_rows, scale_sums
from tests.effort import each_value
from tests.kernels.closeness import DTYPES, assert_close

KINDS = [torch.uint8, torch.int8]


def rounded(x: torch.Tensor, kind: torch.dtype, num_rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full((num_rows or len(x), x.shape[1]), 77, dtype=kind)
    factors = torch.full((len(x), 1), 7.0)
    quantize_rows(x, codes, factors)
    return codes, factors


def numbers(codes: torch.Tensor) -> torch.Tensor:
    return reference.float8_numbers(codes) if codes.dtype == torch.uint8 else codes.float()


@pytest.mark.parametrize(("dtype", "kind", "size"), each_value(DTYPES, KINDS, [16, 48, 2064]))
def test_codes_are_the_nearest(size: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    """By a step at most, where a number is nearly between two codes."""
    x = (torch.randn(3, size) * torch.tensor([[1e-3], [1.0], [300.0]])).to(dtype)
    codes, factors = rounded(x, kind)
    _, scales = reference.quantized_rows(x.float(), kind)
    assert torch.allclose(factors, scales, rtol=1e-6, atol=0)
    step = 0.5 if kind == torch.int8 else 1 / 16
    found = numbers(codes) * factors
    limit = step * (factors if kind == torch.int8 else torch.maximum(x.float().abs(), factors / 32))
    assert ((found - x.float()).abs() <= 1.01 * limit).all()
    assert numbers(codes).abs().amax(1).tolist() == [448.0 if kind == torch.uint8 else 127.0] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_rows_that_are_not_finite(kind: torch.dtype) -> None:
    x = torch.randn(5, 40)
    x[0], x[1], x[2, 3], x[3, 39] = 0.0, 1e-37, torch.nan, -torch.inf
    codes, factors = rounded(x, kind)
    assert not numbers(codes[:2]).any()
    assert factors[:2].isfinite().all()
    assert factors[2:4].isnan().all()
    assert torch.equal(codes[4:], rounded(x[4:], kind)[0])
    assert factors[4].isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_wider_rows_to_more_rows(kind: torch.dtype) -> None:
    wide = torch.randn(3, 96)
    codes, factors = rounded(wide[:, 16:64], kind, 5)
    expected, scales = rounded(wide[:, 16:64].contiguous(), kind)
    assert torch.equal(codes[:3], expected)
    assert torch.equal(factors, scales)
    assert (codes[3:] == 77).all()


@pytest.mark.parametrize(("dtype", "has_bias"), each_value(DTYPES, [False, True]))
def test_sums_are_scaled(has_bias: bool, dtype: torch.dtype) -> None:
    sums = torch.randint(-(1 << 20), 1 << 20, (4, 1056), dtype=torch.int32)
    factors, scales = torch.rand(3, 1) / 1000, torch.rand(1056) / 1000
    bias = torch.randn(1056).to(dtype) if has_bias else None
    y = torch.empty(3, 1056, dtype=dtype)
    scale_sums(sums, factors, scales, y, bias)
    wide = None if bias is None else bias.double()
    assert_close(y, reference.scaled_sums(sums[:3].double(), factors.double(), scales.double(), wide))
