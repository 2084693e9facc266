"""Compiles the kernels of a model before its weights are there.

A step is rehearsed on tensors without memory (torch's meta device). The launches that the runner makes are handed to Triton
with the order to compile and not to run. It does so in threads, while the weights are read. It keeps the results where the real
launches look for them, and in its cache folder (TRITON_CACHE_DIR) for the next start. What is not rehearsed is
compiled when it is first launched. Called by the runner.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from actorllm.model.cuda.device import Download, HostDevice, HostDownload
from actorllm.model.weights import Weights


class MetaDevice(HostDevice):
    """Tensors without memory."""

    def __init__(self, *, uses_pdl: bool) -> None:
        super().__init__()
        self.torch_device = torch.device("meta")
        self.uses_pdl = uses_pdl

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array)).to("meta")

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return HostDownload([])


class MetaWeights(Weights):
    """The shapes of weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("meta"))

    def take(
        self,
        name: str,
        *shape: int,
        rows: slice = slice(None),
        columns: slice = slice(None),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        return (whole[rows, columns] if len(shape) > 1 else whole[rows]).contiguous()

    def close(self, is_ignorable: Callable[[str], bool]) -> None:
        return None


@contextlib.contextmanager
def compiling(rehearse: Callable[[], None], num_threads: int | None = None) -> Iterator[None]:
    """Compile, beside what is done meanwhile, every kernel that `rehearse` launches; all of them are there at the end.

    A kernel that does not compile raises when it is launched, where `SelfCheck` replaces it.
    """
    with (
        ThreadPoolExecutor(num_threads or os.cpu_count() or 1, "triton") as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True) as mode,
    ):
        with _not_running():
            rehearse()
        for build in list(mode.raw_futures):
            pool.submit(_build_launcher, build)
        yield


def _build_launcher(build: Future[CompiledKernel]) -> None:
    """Triton 3.6 compiles a launcher in C for every signature, at the first launch; it finds this one in its cache then."""
    with contextlib.suppress(Exception):  # the launch says what is wrong
        kernel = build.result()
        driver.active.launcher_cls(kernel.src, kernel.metadata)


@contextlib.contextmanager
def _not_running() -> Iterator[None]:
    """Launches compile, and that is all."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
