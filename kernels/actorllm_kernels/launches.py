"""Launches as they are, without a GPU: recorded from the launchers themselves, to be compiled for a GPU that is not there.

A launch is recorded by calling the launcher on meta tensors. So what is compiled here is what runs there, with the same
specializations. Used by `gates`, by the worker's rehearsal of its launches, and by their tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from actorllm_kernels.configs import table_of, target


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a jitted function, with what its specialization depends on."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    """Arguments known to be multiples of 16."""
    options: dict[str, int | bool]
    grid: tuple[int, ...]

    def compile(self, architecture: str) -> Any:
        """For a compute capability such as "sm_90"."""
        names = self.kernel.arg_names
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}
        source = ASTSource(fn=self.kernel, signature=self.signature, constexprs=self.constants, attrs=attributes)
        capability = int(architecture.removeprefix("sm_"))
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))


_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches are appended to the list instead of being run."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible = []
        for parameter in self.params:
            name, value = parameter.name, values[parameter.name]
            is_specialized = type(value) is int and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (is_specialized and value == 1):
                signature[name], constants[name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = _POINTERS[value.dtype]
                divisible.append(name)
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                # A parameter with a type of its own has one build for small numbers and for large ones.
                signature[name] = parameter.annotation_type or ("i32" if -(2**31) <= value < 2**31 else "i64")
                if is_specialized and value % 16 == 0:
                    divisible.append(name)
        options = {k: v for k, v in kwargs.items() if k not in names and (v or k != "launch_pdl")}
        launches.append(Launch(self, signature, constants, tuple(divisible), options, tuple(grid)))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def names_for(architecture: str) -> list[str]:
    """The shipped launches that there are for it: only 9.x has the unit for descriptors as they use it."""
    from actorllm_kernels.shipped import SHIPPED

    return [name for name in SHIPPED if "-tma" not in name or architecture == "sm_90"]


def record_one(case: Callable[[], None], architecture: str) -> Launch:
    """The launch of a shipped case, configured for GPUs of this compute capability."""
    with target(table_of(architecture)), recording() as launches:
        case()
    (launch,) = launches
    return launch
