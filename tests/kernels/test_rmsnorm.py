from __future__ import annotations

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.rmsnorm import rmsnorm
from tests.kernels.closeness import DTYPES, assert_close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 1024])
def test_agrees_with_the_reference(size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, size).to(dtype), torch.randn(size).to(dtype)
    y = torch.empty_like(x)
    rmsnorm(x, weight, 1e-6, y)
    assert_close(y, reference.rmsnorm(x.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_adds_the_residual_first(unit_offset: bool, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(4, 96).to(dtype), torch.randn(4, 96).to(dtype), torch.randn(96).to(dtype)
    total = x.double() + residual.double()
    rmsnorm(x, weight, 1e-5, x, residual, unit_offset=unit_offset)
    assert_close(residual, total)  # the interpreter does not round to the nearest bfloat16
    assert_close(x, reference.rmsnorm(residual.double(), weight.double() + unit_offset, 1e-5))
