"""An emulated device whose memory can be given back: the driver's calls go to a library with memory of the host."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.cuda.virtual_memory import Driver
from tests.model.cuda.host_engine import CountingRunner, LaggingDevice

COMPILER = shutil.which("gcc") or shutil.which("cc")
SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "ACTORLLM_TEST_HOST_MEMORY"
"""The environment variable that tells processes of an engine where the library is."""
OUT_OF_MEMORY = 2
PIECE = 1 << 16
"""As small as a piece of a region can be there."""


def library() -> str:
    """The path of the library, compiled once against CUDA's header."""
    if LIBRARY not in os.environ:
        assert COMPILER is not None
        made = Path(tempfile.mkdtemp(prefix="host-memory-")) / "libcuda.so"
        include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
        options = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{include}"]
        subprocess.run([COMPILER, *options, str(SOURCE), "-o", str(made)], check=True)
        os.environ[LIBRARY] = str(made)
    return os.environ[LIBRARY]


class HostMemory:
    """What is there, and what goes wrong, in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(library())
        for name in ("held", "most_held"):
            getattr(self._library, f"host_memory_{name}").restype = ctypes.c_size_t

    @property
    def held(self) -> int:
        """Bytes that were created and not given back."""
        return int(self._library.host_memory_held())

    @property
    def num_ranges(self) -> int:
        """Reservations of addresses."""
        return int(self._library.host_memory_num_ranges())

    def limit(self, num_bytes: int | None) -> None:
        """How much may be held; None: any amount."""
        self._library.host_memory_limit(ctypes.c_size_t(-1 if num_bytes is None else num_bytes))

    def support(self, is_there: bool) -> None:
        """Whether devices have virtual memory."""
        self._library.host_memory_support(is_there)

    def fail(self, name: str, after: int = 0, code: int = OUT_OF_MEMORY) -> None:
        """Let the call of this name fail once, after so many that do not."""
        self._library.host_memory_fail(name.encode(), after, code)


def signal_of(touch: Callable[[], object]) -> int:
    """What ends a process that does this; 0: nothing. Raises AssertionError: it has raised something."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        signal.alarm(60)
        try:
            touch()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert not (os.WIFEXITED(status) and os.WEXITSTATUS(status))
    return os.WTERMSIG(status)


def sleeping(device: type[HostDevice], **arguments: Any) -> HostDevice:
    """A device of this class, with memory that can be given back."""
    return device(driver=Driver(0, library()), **arguments)


def load(self: WorkerActor, config: EngineConfig) -> CudaRunner:
    """In the place of WorkerActor._load."""
    runner = CountingRunner(config, self.rank, show_progress=False, device=sleeping(LaggingDevice))
    runner.load()
    return runner


class SleepingWorkerActor(WorkerActor):
    """A worker process whose GPU is the host, and whose memory can be given back."""

    def _load(self, config: EngineConfig) -> CudaRunner:
        runner = CudaRunner(config, self.rank, show_progress=False, device=sleeping(HostDevice))
        runner.load()
        return runner


def fail(worker: Any, name: str, after: int, code: int) -> None:
    """For `collective_rpc`: as `HostMemory.fail`, in the process of the worker."""
    HostMemory().fail(name, after, code)


def limit(worker: Any, num_bytes: int | None) -> None:
    """For `collective_rpc`: as `HostMemory.limit`."""
    HostMemory().limit(num_bytes)


def held(worker: Any) -> int:
    """For `collective_rpc`: as `HostMemory.held`."""
    return HostMemory().held
