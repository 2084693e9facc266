"""How far a kernel may be from its reference."""

from __future__ import annotations

import torch

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCES)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """Within a few units in the last place of the actual type, given values of about 1."""
    assert not torch.isnan(actual).any()
    error = (actual.double() - expected.double()).abs() / (1 + expected.double().abs())
    limit = scale * TOLERANCES[actual.dtype]
    assert error.max().item() <= limit, f"{error.max().item():.2e} > {limit:.2e}"
