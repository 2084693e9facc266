"""What tests do where Triton believes that there is a GPU: `python -m tests.kernels.stub.programs CALLS`.

CALLS: JSON, a list of [file for what is launched, name of a function, its arguments ...]. The results go to standard output.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

from actorllm_kernels import launcher
from actorllm_kernels.launches import recording
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.shipped import SHIPPED

STREAM = 7


class StubDriver(CudaDriver):
    """Triton's driver, but for what it asks torch."""

    def __init__(self) -> None:
        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher
        self.get_current_device = lambda: 0
        self.get_device_capability = lambda _: (9, 0)
        self.get_current_stream = lambda _: STREAM


def on_a_gpu(is_so: bool) -> None:
    """Whether our launcher takes tensors for those of device 0."""
    torch.Tensor.get_device = lambda _: 0 if is_so else -1  # type: ignore[method-assign]


class Addresses:
    """Gives tensors made-up addresses, in the order in which they are asked for. So they show who asked for which."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._true = torch.Tensor.data_ptr
        torch.Tensor.data_ptr = lambda tensor: self._of(tensor)  # type: ignore[method-assign]

    def _of(self, tensor: torch.Tensor) -> int:
        return self._known.setdefault(id(tensor), (1 << 40) + 256 * len(self._known))

    def forget(self) -> None:
        self._known.clear()

    def end(self) -> None:
        torch.Tensor.data_ptr = self._true  # type: ignore[method-assign]


def norms() -> list[int]:
    """A norm twice: by Triton, and as it is kept. Returns the addresses that it was given."""
    x, weight = torch.zeros(32, 1024, dtype=torch.bfloat16), torch.zeros(1024)
    y, residual = torch.zeros_like(x), torch.zeros_like(x)
    on_a_gpu(True)
    for _ in range(2):
        rmsnorm(x, weight, 1e-6, y, residual, pdl=True)
    return [tensor.data_ptr() for tensor in (x, residual, weight, y)]


def shipped(names: list[str]) -> None:
    """Each of them three times: by Triton alone, by our launcher for the first time, and as it is kept."""
    addresses = Addresses()
    for name in names:
        for is_so in (False, True, True):
            on_a_gpu(is_so)
            addresses.forget()
            SHIPPED[name]()
    addresses.end()


@triton.jit(do_not_specialize=["loose"])
def numbers_kernel(x_ptr, fixed, loose, scale, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(x_ptr + i, (tl.load(x_ptr + i) * scale + fixed + loose).to(tl.float32))


def kinds(numbers: list[int]) -> None:
    """A kernel with each of these integers, on aligned memory and not: by Triton alone, then as it is kept, in another order."""
    memory = torch.zeros(64)
    calls = [(memory[offset:], fixed, loose) for offset in (0, 1, 4) for fixed in numbers for loose in numbers[:4]]
    for is_so, some in ((False, calls), (True, calls), (True, calls[::-1])):
        on_a_gpu(is_so)
        for x, fixed, loose in some:
            launcher.launch(numbers_kernel, (1,), (x, fixed, loose, 0.5), SIZE=16, num_warps=1)


def hooked() -> list[int]:
    """How many launches a hook has heard of: before it listened, while it did, and at the end."""
    heard: list[Any] = []
    found = []
    x = torch.zeros(16)
    on_a_gpu(True)

    def launch_twice() -> None:
        for _ in range(2):
            launcher.launch(numbers_kernel, (1,), (x, 3, 4, 0.5), SIZE=16, num_warps=1)
        found.append(len(heard))

    launch_twice()
    knobs.runtime.launch_enter_hook.add(heard.append)
    launch_twice()
    knobs.runtime.launch_enter_hook.remove(heard.append)
    launch_twice()
    return found


def forgotten() -> list[bool]:
    """Of each build of a kernel that was launched here, whether it is still loaded when Triton has forgotten it."""
    x = torch.zeros(16)
    on_a_gpu(True)
    launcher.launch(numbers_kernel, (1,), (x, 3, 4, 0.5), SIZE=16, num_warps=1)
    known = numbers_kernel.device_caches[0][0]
    builds = [weakref.ref(build) for build in known.values()]
    known.clear()
    gc.collect()
    launcher.launch(numbers_kernel, (1,), (x, 3, 4, 0.5), SIZE=16, num_warps=1)
    return [build() is not None for build in builds]


def specializations(names: list[str]) -> dict[str, list[str]]:
    """Launch name -> what `launches.recording` takes for it, and what Triton has compiled, where the two differ."""
    differing: dict[str, list[str]] = {}
    addresses = Addresses()
    on_a_gpu(False)
    for name in names:
        with recording() as launches:
            SHIPPED[name]()
        (recorded,) = launches
        builds = recorded.kernel.device_caches[0][0]
        builds.clear()
        SHIPPED[name]()
        ((build,),) = (builds.values(),)
        source = build.src
        order = recorded.kernel.arg_names
        constants = {
            (order.index(one) if isinstance(one, str) else one[0]): value for one, value in source.constants.items()
        }
        theirs = (
            {key: kind for key, kind in source.signature.items() if kind != "constexpr"},
            dict(sorted(constants.items())),
            sorted(order[path[0]] for path, attributes in source.attrs.items() if attributes),
        )
        ours = (
            {key: kind for key, kind in recorded.signature.items() if kind != "constexpr"},
            {
                order.index(key): value
                for key, value in sorted(recorded.constants.items(), key=lambda x: order.index(x[0]))
            },
            sorted(recorded.divisible),
        )
        if ours != theirs:
            differing[name] = [repr(ours), repr(theirs)]
    addresses.end()
    return differing


PROGRAMS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (norms, shipped, kinds, hooked, forgotten, specializations)
}


def bits(value: float) -> str:
    """The bytes of a float32, as the stub writes them."""
    return struct.pack("<f", value).hex()


if __name__ == "__main__":
    ctypes.CDLL(f"{os.environ['TRITON_LIBCUDA_PATH']}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    triton.runtime.driver.set_active(StubDriver())
    results = []
    for log, name, *arguments in json.loads(sys.argv[1]):
        os.environ["STUB_LOG"] = log
        results.append(PROGRAMS[name](*arguments))
    print(json.dumps(results))
