"""`preflight`: whether a machine can run the GPU path, looked at before anything is loaded.

What cannot work is an error, and what only costs speed a warning. Each names what was found, and the way out. Compute capability
and shared memory are `device.check_gpu`'s.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from actorllm.errors import ConfigError

MIN_DRIVER = (12, 3)
"""CUDA of the driver: older ones cannot capture dependent launches in a graph."""
MIN_FREE_BYTES = 1 << 30
"""Of the GPU's memory; less holds no model and its graphs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be."""

    what: str
    """One sentence, and the way out."""
    is_error: bool


def driver_version() -> tuple[int, int] | None:
    """CUDA's version of the driver; None: there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def captures_dependents(version: tuple[int, int] | None) -> bool:
    """Whether a graph may hold dependent launches."""
    return version is not None and version >= MIN_DRIVER


def compiler() -> str | None:
    """The C compiler that Triton would take; None: there is none."""
    named = os.environ.get("CC")
    if named is not None:
        return shutil.which(named)
    return shutil.which("gcc") or shutil.which("clang")


def python_header() -> Path:
    """Where Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # of Debian; Triton does the same
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"


def preflight(free_bytes: int | None = None) -> list[Finding]:
    """What was found on this machine. free_bytes: of the GPU's memory, if it is known."""
    found: list[Finding] = []

    def add(what: str, *, is_error: bool = True) -> None:
        found.append(Finding(what, is_error))

    if compiler() is None:
        named = os.environ.get("CC")
        where = "and neither gcc nor clang is installed" if named is None else f"and CC={named} cannot be run"
        add(f"Triton compiles its driver module with a C compiler, {where}; install gcc, or set CC")
    elif not (header := python_header()).exists():
        add(f"Triton compiles its driver module against Python's headers, and {header} is missing; install python3-dev")
    version = driver_version()
    if version is None:
        add("no driver of NVIDIA is found (libcuda.so.1); install one, or use device='cpu'")
    elif not captures_dependents(version):
        number, least = (".".join(map(str, one)) for one in (version, MIN_DRIVER))
        add(
            f"the driver supports CUDA {number}, and graphs with dependent launches need {least}: steps are launched without them, "
            "which costs some microseconds per launch; a newer driver ends that",
            is_error=False,
        )
    if free_bytes is not None and free_bytes < MIN_FREE_BYTES:
        add(
            f"{free_bytes >> 20} MiB of the GPU's memory are free, and an engine needs {MIN_FREE_BYTES >> 20}; end what holds the "
            "rest (nvidia-smi lists it)"
        )
    return found


def check(free_bytes: int | None = None) -> list[Finding]:
    """The warnings. Raises ConfigError with what cannot work."""
    found = preflight(free_bytes)
    if errors := [finding.what for finding in found if finding.is_error]:
        raise ConfigError(f"device='cuda': {'; '.join(errors)}")
    return found
