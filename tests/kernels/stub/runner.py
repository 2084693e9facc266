"""Triton's own launcher on a driver library that has no device: what would be launched is written down.

`run` starts a function of `programs` in a process of its own. There, torch's tensors are on the meta device or the CPU, and are
taken for those of device 0. What Triton compiles, binds and packs is what it would on a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("cc")


@dataclass(frozen=True, slots=True)
class Launched:
    """One call of the driver's launch."""

    kernel: str
    build: str
    """The driver's handle of the function."""
    grid: list[int]
    threads: int
    shared: int
    stream: int
    is_dependent: int
    num_other_attributes: int
    parameters: list[str]
    """The bytes of each, as the compiled kernel would read them."""


@functools.cache
def library() -> Path:
    """The folder of the stub, compiled once."""
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(prefix="stub-"))
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}", str(HERE / "libcuda.c")]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


def run(*programs: tuple[Any, ...]) -> list[tuple[Any, list[Launched]]]:
    """Of each program, a name and its arguments: what it returned, and what it launched. All in one process, in this order."""
    folder = library()
    logs = [folder / f"{i}.jsonl" for i in range(len(programs))]
    for log in logs:
        log.write_text("")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
    calls = [(str(log), *program) for log, program in zip(logs, programs, strict=True)]
    command = [sys.executable, "-m", "tests.kernels.stub.programs", json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[2], check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(programs)
    return [
        (one, [Launched(**json.loads(line)) for line in log.read_text().splitlines()])
        for one, log in zip(found, logs, strict=True)
    ]
