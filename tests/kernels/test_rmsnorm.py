from __future__ import annotations

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.rmsnorm import rmsnorm
from tests.effort import each_value
from tests.kernels.closeness import DTYPES, assert_close


@pytest.mark.parametrize(("dtype", "size"), each_value(DTYPES, [64, 80, 1024]))
def test_agrees_with_the_reference(size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, size).to(dtype), torch.randn(size).to(dtype)
    y = torch.empty_like(x)
    rmsnorm(x, weight, 1e-6, y)
    assert_close(y, reference.rmsnorm(x.double(), weight.double(), 1e-6))


def test_columns_of_wider_rows_in_place() -> None:
    """As of the queries and the keys of a token; what lies beside them stays."""
    wide, weight = torch.randn(3, 200), torch.randn(96)
    before = wide.clone()
    part = wide[:, 64:160]
    rmsnorm(part, weight, 1e-6, part)
    assert_close(part, reference.rmsnorm(before[:, 64:160].double(), weight.double(), 1e-6))
    assert torch.equal(wide[:, :64], before[:, :64])
    assert torch.equal(wide[:, 160:], before[:, 160:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_adds_the_residual_first(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(4, 96).to(dtype), torch.randn(4, 96).to(dtype), torch.randn(96).to(dtype)
    total = x.double() + residual.double()
    rmsnorm(x, weight, 1e-5, x, residual)
    assert_close(residual, total)  # the interpreter does not round to the nearest bfloat16
    assert_close(x, reference.rmsnorm(residual.double(), weight.double(), 1e-5))


def test_columns_of_wider_rows_to_rows_of_their_own() -> None:
    wide, weight, y = torch.randn(3, 200), torch.randn(96), torch.full((4, 96), 9.0)
    rmsnorm(wide[:, 64:160], weight, 1e-6, y[:3])
    assert_close(y[:3], reference.rmsnorm(wide[:, 64:160].double(), weight.double(), 1e-6))
    assert (y[3] == 9).all()
