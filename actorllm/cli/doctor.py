"""`actorllm doctor`: whether this machine runs the engine as it should, on one page.

Owns how that is printed, and what the CPU path needs. What the GPU path needs is `actorllm.model.cuda.proof`'s.
"""

from __future__ import annotations

import os
import platform
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cyclopts import App

doctor = App(name="doctor", help="Check what the engine needs of this machine.")

MIN_SHARED_BYTES = 256 << 20
"""Of /dev/shm: the rings of an engine, and room for a second one."""
MIN_MEMORY_BYTES = 2 << 30
FAST_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""Of a processor, the fastest first: products in bfloat16 need one of the first two."""


class MachineCheck(NamedTuple):
    """One line of the page."""

    name: str
    state: str
    """ok, slow or broken."""
    told: str


@doctor.default
def check(model: str = "storyteller", /, *, device: str = "auto") -> int:
    """Check the machine, and on a GPU every kernel of MODEL against torch, and print a page. Exit status 1: something is broken.

    Parameters
    ----------
    model
        Whose kernels are checked on a GPU; its weights are read.
    device
        "cpu" checks the CPU path alone.
    """
    checks = [*_host_checks(), *_gpu_checks(model, device)]
    for one in checks:
        lines = textwrap.wrap(one.told, 96)
        print(f"{one.name:<18} {one.state:<7} {lines[0]}")
        for line in lines[1:]:
            print(f"{'':<26} {line}")
    return int(any(one.state == "broken" for one in checks))


def _host_checks() -> Iterator[MachineCheck]:
    from actorllm.model.memory import available_bytes

    yield MachineCheck("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    flags = _processor_flags()
    fastest = next((flag for flag in FAST_FLAGS if flag in flags), None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if fastest in FAST_FLAGS[:2]:
        yield MachineCheck("processor", "ok", f"{cores} cores with {fastest}")
    else:
        told = f"{cores} cores with {fastest or 'none of ' + ', '.join(FAST_FLAGS)}"
        yield MachineCheck("processor", "slow", f"{told}; without amx_bf16 or avx512_bf16, dtype='float32' is faster")
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield MachineCheck(
            "shared memory", "broken", "there is no /dev/shm, which topology='process' needs; use topology='inline'"
        )
    else:
        free = shutil.disk_usage(shared).free
        yield _enough(
            "shared memory", free, MIN_SHARED_BYTES, "in /dev/shm; give the container more (docker: --shm-size=1g)"
        )
    yield _enough(
        "memory", available_bytes(), MIN_MEMORY_BYTES, "available; end other programs, or set kv_cache_memory_bytes"
    )


def _enough(name: str, found: int, wanted: int, where: str) -> MachineCheck:
    what, _, way_out = where.partition("; ")
    if found >= wanted:
        return MachineCheck(name, "ok", f"{found >> 20} MiB {what}")
    return MachineCheck(name, "broken", f"{found >> 20} MiB {what}, and an engine wants {wanted >> 20}; {way_out}")


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _gpu_checks(model: str, device: str) -> Iterator[MachineCheck]:
    import torch

    from actorllm.errors import ActorLLMError

    if device == "cpu":
        return
    if not torch.cuda.is_available():
        state = "broken" if device == "cuda" else "ok"
        yield MachineCheck("gpu", state, f"none that torch {torch.__version__} can use; the engine runs on the CPU")
        return
    from actorllm.model.cuda.proof import preflight

    free, total = torch.cuda.mem_get_info()
    yield MachineCheck("gpu", "ok", f"{torch.cuda.get_device_name()}, {free >> 20} of {total >> 20} MiB free")
    findings = preflight.preflight(free)
    for finding in findings:
        yield MachineCheck("driver, compiler", "broken" if finding.is_error else "slow", finding.what)
    if any(finding.is_error for finding in findings):
        return
    try:
        yield from kernel_checks(model)
    except ActorLLMError as error:
        yield MachineCheck("kernels", "broken", str(error))


def kernel_checks(model: str, start: Callable[[str], object] | None = None) -> Iterator[MachineCheck]:
    """Of a runner that has started: start(model) is for tests, and starts one as the worker does."""
    from actorllm.model.cuda import ops

    runner = (_started if start is None else start)(model)
    replaced = ops.replaced()
    if replaced:
        told = (
            f"torch computes in place of {', '.join(replaced)}, which do not do here what they should; please report it"
        )
        yield MachineCheck("kernels", "slow", told)
    else:
        yield MachineCheck("kernels", "ok", f"all that {model} launches give what torch gives")
    graphs = getattr(runner, "graphs", None)
    is_on = graphs is not None and graphs.is_on
    told = "a recorded decode step gives what a launched one gives"
    if not is_on:
        told = "steps are launched kernel by kernel; the log says why"
    yield MachineCheck("graphs", "ok" if is_on else "slow", told)


def remembered_checks() -> dict[str, str]:
    """What the self-checks of this user's engines have found, for `actorllm info --device`."""
    from actorllm.model.cuda.proof import memory

    entries = memory.entries()
    if not entries:
        return {"kernels": "not checked yet; actorllm doctor does"}
    failed = {name: what for entry in entries for name, what in entry["failed"].items()}
    last = max(entry["date"] for entry in entries)
    told = f"checked {len(entries)} times, last {last}: "
    return {
        "kernels": told + ("all right" if not failed else "; ".join(f"{name} {what}" for name, what in failed.items()))
    }


def _started(model: str) -> object:
    from actorllm.config import EngineConfig
    from actorllm.model.cuda.proof import memory
    from actorllm.model.cuda.runner import CudaRunner

    os.environ[memory.AGAIN] = "again"
    runner = CudaRunner(EngineConfig.from_arguments(model, device="cuda"))
    runner.load()
    runner.allocate(runner.profile_num_blocks())
    return runner
