"""Kernel tests run in Triton's interpreter, on CPU tensors.

`triton.jit` decides at import whether a function is to be interpreted, and whoever imported Triton first has decided for
the whole process. So every jitted function in sight is exchanged for an interpreted one, for the length of a test.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import actorllm_kernels
from tests.kernels.quick_launches import make_launches_quick

KERNEL_MODULES = [
    importlib.import_module(f"actorllm_kernels.{module.name}")
    for module in pkgutil.iter_modules(actorllm_kernels.__path__)
]


@functools.cache
def interpreted(module: ModuleType) -> dict[str, InterpretedFunction]:
    """What replaces the jitted functions of a module, by name."""
    return {
        name: InterpretedFunction(value.fn) for name, value in vars(module).items() if isinstance(value, JITFunction)
    }


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    modules = [tl, *(module for name, module in sys.modules.items() if name.startswith("triton.language.")), triton]
    for module in [*modules, *KERNEL_MODULES, request.module]:
        for name, function in interpreted(module).items():
            monkeypatch.setattr(module, name, function)
    make_launches_quick(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"), warnings.catch_warnings():  # a GPU makes infinities and NaN without a word
        warnings.filterwarnings("ignore", message="All-NaN slice", category=RuntimeWarning)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
