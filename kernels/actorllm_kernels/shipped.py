"""Every launch that the worker makes, by name, as calls on meta tensors (see `resources`).

The shapes are those of the five models of bench/gpu.py, and of the head sizes and group sizes that other models have. A
launch that is not here is not shipped: the resource table, and the compilation at start-up, know it from this list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from actorllm_kernels.rmsnorm import rmsnorm

SHIPPED: dict[str, Callable[[], None]] = {}


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rmsnorm(size: int, has_residual: bool, pdl: bool) -> None:
    x, residual = _meta(32, size), _meta(32, size) if has_residual else None
    rmsnorm(x, _meta(size), 1e-6, x, residual, pdl=pdl)


for size in (1024, 1536, 2048, 4096):
    SHIPPED[f"rmsnorm-{size}-residual-pdl"] = partial(_rmsnorm, size, True, True)
SHIPPED["rmsnorm-4096-residual"] = partial(_rmsnorm, 4096, True, False)
SHIPPED["rmsnorm-4096-pdl"] = partial(_rmsnorm, 4096, False, True)
