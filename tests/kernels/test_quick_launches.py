"""Launches in the interpreter replace the language for their length, in whichever module a function has it from."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tests.kernels.quick_launches import OWNERS, builtins_of


@triton.jit
def doubled(x):
    return tl.where(x > 0, x + x, 0)


@triton.jit
def total_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(y_ptr + tl.program_id(0), tl.sum(doubled(x), 0) + tl.max(x, 0))


def language() -> list[Any]:
    names = [(owner, name) for owner in OWNERS for name, _ in builtins_of(owner)]
    names += [(module, name) for module in (tl, tl.core) for name in ("range", "reduce", "static_assert")]
    return [getattr(owner, name) for owner, name in [*names, (tl.dtype, "to_ir"), (tl.tensor, "T")]]


def test_a_kernel_calls_functions_and_the_language_is_as_before() -> None:
    before, y = language(), torch.zeros(2)
    assert all(map(builtins_of, OWNERS))
    total_kernel[(2,)](torch.tensor([1.0, -3.0, 2.0, 4.0]), y, 4)
    assert y.tolist() == [18.0, 18.0]
    assert language() == before
