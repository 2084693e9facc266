"""Where the tensors of a runner are, and the few things that are done differently there.

`CudaDevice` is a GPU. It has one stream, on which everything of a runner happens in the order of its calls. Uploads come from
pinned memory, downloads go into pinned memory behind an event, graphs come from capture. `HostDevice` has the same surface on CPU
tensors: launches run at once, and a graph is the list of what it repeats (`host_graph`). So CI runs every line of the step but
those of `CudaDevice`.

Nothing that a step needs waits for the GPU but `Download.wait`. Owned by the runner.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.errors import ConfigError
from actorllm.model.cuda import host_graph
from actorllm.model.cuda.proof import preflight
from actorllm.model.cuda.virtual_memory import Addresses, Driver, DriverError, Region
from actorllm_kernels.configs import MAX_SHARED, architecture_of

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies, and the oldest that the kernels are compiled for."""

ALIGNMENT = 16
"""Bytes at a multiple of which Triton likes tensors to begin."""

Replay = Callable[[], None]


class Download(ABC):
    """Tensors on their way to the host."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> list[NDArray[Any]]:
        """Block until they are here. Raises what the GPU has run into meanwhile; may be called again."""

    @abstractmethod
    def waiter(self) -> Callable[[], None]:
        """What blocks as `wait` does, for another thread. It holds none of the tensors.

        The thread that frees the last copy tells the stream so, which must not happen while it is captured; so that is left to the
        runner's own thread.
        """


class Device(ABC):
    """See the module docstring."""

    torch_device: torch.device
    description: str
    """What it is, and by which driver it runs."""
    proves_itself: bool = False
    """Whether kernels, and a recorded step, are checked before they are used."""
    uses_pdl: bool
    """Launches inside a graph may begin before the one in front has ended, up to where they wait for it."""
    _driver: Driver | None = None
    """What gives memory to addresses, once something has asked for it."""
    keeps_addresses: bool = False
    """Whether memory may be given back while its addresses stay (`reserve`)."""

    @abstractmethod
    def active(self) -> contextlib.AbstractContextManager[None]:
        """Everything inside happens on this device, in order."""

    @abstractmethod
    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        """A copy on the device, in order with the launches. The array may be changed at once."""

    def upload_parts(self, *parts: NDArray[Any]) -> list[torch.Tensor]:
        """Several arrays of one type in one copy, as vectors.

        Each begins at a multiple of ALIGNMENT bytes: a kernel is compiled anew for tensors that do not.
        """
        size = ALIGNMENT // parts[0].itemsize
        lengths = [-(-part.size // size) * size for part in parts]
        packet = np.zeros(sum(lengths), parts[0].dtype)
        start = 0
        for part, length in zip(parts, lengths, strict=True):
            packet[start : start + part.size] = part.reshape(-1)
            start += length
        pieces = torch.split(self.upload(packet), lengths)
        return [piece[: part.size] for piece, part in zip(pieces, parts, strict=True)]

    @abstractmethod
    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Copies of what they hold once all launches so far have run."""

    @abstractmethod
    def capture(self, launch: Callable[[], None]) -> Replay:
        """What repeats the launches that `launch` makes, with the same tensors. They do not run while they are captured.

        Raises what `launch` raises, or why they cannot be repeated; the device is then as it was.
        """

    @abstractmethod
    def wait_for_all(self) -> None:
        """Block until the device has done everything that any thread has launched."""

    def reserve(self, num_bytes: int) -> Region:
        """Addresses for so many bytes, without memory. Raises DriverError: the driver cannot do that."""
        if self._driver is None:
            self._driver = self._open_driver()
        return Region(self._driver, num_bytes, self.wait_for_all)

    def _open_driver(self) -> Driver:
        raise DriverError("this device has no virtual memory")

    def has_reserved(self, address: int) -> bool:
        """Whether this address is of a region of this device."""
        return self._driver is not None and self._driver.has_reserved(address)

    def bytes_of(self, addresses: Addresses) -> torch.Tensor:
        """The memory at addresses of a region, uint8; there must be some behind the first one."""
        return torch.from_numpy(np.asarray(addresses))

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host for a copy, uint8: pinned where that is possible."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    @property
    def _reserved_bytes(self) -> int:
        """Memory behind the addresses of regions."""
        return 0 if self._driver is None else self._driver.held_bytes

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether nothing can be launched any more in this process, because of something that was launched before."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Of the device's memory."""

    @abstractmethod
    def foreign_bytes(self) -> int:
        """Of it, what others hold: other processes, and the driver for this one."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Of it, what the tensors of this process take now."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """As `held_bytes`, with what is kept for tensors to come: all that this process could give back."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let `peak_bytes` begin from what is held now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that the tensors of this process have taken since `reset_peak`."""

    @abstractmethod
    def trim(self) -> None:
        """Give back what no tensor and no graph holds, to other processes too; pinned memory of the host as well."""

    @abstractmethod
    def release(self) -> None:
        """Give back what no tensor holds any more, when all graphs are gone."""


class CudaDevice(Device):
    """One GPU."""

    keeps_addresses = True

    def __init__(self, index: int = 0, *, uses_pdl: bool = True) -> None:
        """Raises ConfigError with the reason when there is none that can be used."""
        check_gpu(index)
        for warning in preflight.check(torch.cuda.mem_get_info(index)[0]):
            logger.warning("%s", warning.what)
        self.torch_device = torch.device("cuda", index)
        version = preflight.driver_version()
        self.description = f"{torch.cuda.get_device_name(index)}, driver for CUDA {version}"
        self.proves_itself = True
        self.uses_pdl = uses_pdl and preflight.captures_dependents(version)
        self._stream: Any = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._abandoned: list[Any] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._stream):
            yield

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        # The allocator of pinned memory hands a block out again only when the copies out of it have run.
        pinned = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self.torch_device, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits for it sleeps
        event.record(self._stream)
        return CudaDownload(copies, event)

    def capture(self, launch: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all: no two of them run at the same time
        # What is freed meanwhile may leave an event on the captured stream, which cannot be asked about later.
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            # Not `torch.cuda.graph`, which waits for the GPU and empties the allocator's cache first.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # that the capture is broken says less than what broke it
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            self._abandon(graph)
            raise
        finally:
            if collects_garbage:
                gc.enable()
        replay: Replay = graph.replay
        return replay

    def _abandon(self, graph: Any) -> None:
        """Undo what a capture that failed may have left in torch's allocators."""
        self._abandoned.append(graph)  # they may still ask it which memory is its own
        with contextlib.suppress(RuntimeError):  # it may have ended as it should
            torch._C._cuda_endAllocateToPool(self.torch_device.index, self._pool)
        self._pool = None

    def wait_for_all(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def _open_driver(self) -> Driver:
        torch.cuda.synchronize(self.torch_device)  # which has made the context that the driver needs
        return Driver(self.torch_device.index)

    def bytes_of(self, addresses: Addresses) -> torch.Tensor:
        tensor = torch.as_tensor(addresses, device=self.torch_device)
        if tensor.data_ptr() != addresses.address:
            raise DriverError(f"torch {torch.__version__} makes a copy of memory at addresses that are reserved")
        return tensor

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # the system limits what may be pinned: copies take longer then
            return torch.empty(num_bytes, dtype=torch.uint8)

    @property
    def is_lost(self) -> bool:
        try:
            self._stream.query()
        except RuntimeError:
            return True
        return False

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def foreign_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, total - free - self.resident_bytes())

    def held_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device)) + self._reserved_bytes

    def resident_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch_device)) + self._reserved_bytes

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self.torch_device)
        return int(torch.cuda.max_memory_allocated(self.torch_device)) + self._reserved_bytes

    def trim(self) -> None:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def release(self) -> None:
        self._pool = None  # its graphs are gone: torch takes it for no other
        torch.cuda.empty_cache()


class CudaDownload(Download):
    """Copies into pinned memory, and the event behind them."""

    def __init__(self, copies: list[torch.Tensor], event: Any) -> None:
        self._copies = copies
        self._event = event

    @property
    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> list[NDArray[Any]]:
        self._event.synchronize()
        return [copy.numpy() for copy in self._copies]

    def waiter(self) -> Callable[[], None]:
        wait: Callable[[], None] = self._event.synchronize
        return wait


class HostDevice(Device):
    """CPU tensors, with launches that run at once."""

    def __init__(self, total_bytes: int = 1 << 30, driver: Driver | None = None) -> None:
        """driver: of a library whose memory is the host's; None: memory cannot be given back under its addresses."""
        self.torch_device = torch.device("cpu")
        self.description = "CPU tensors"
        self.uses_pdl = False
        self._total_bytes = total_bytes
        self._driver, self.keeps_addresses = driver, driver is not None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.array(array))

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return HostDownload([t.numpy().copy() for t in tensors])

    def capture(self, launch: Callable[[], None]) -> Replay:
        with host_graph.recording() as nodes:
            launch()

        def replay() -> None:
            for node in nodes:
                node()

        return replay

    def wait_for_all(self) -> None:
        """Launches run at once."""

    @property
    def is_lost(self) -> bool:
        return False

    def total_bytes(self) -> int:
        return self._total_bytes

    def foreign_bytes(self) -> int:
        return 0

    def held_bytes(self) -> int:
        return 0

    def resident_bytes(self) -> int:
        return self._reserved_bytes

    def reset_peak(self) -> None:
        """Nothing is measured: `peak_bytes` is 0."""

    def peak_bytes(self) -> int:
        return 0

    def trim(self) -> None:
        """The host's memory is given back as tensors go."""

    def release(self) -> None:
        """As tensors go, too."""


class HostDownload(Download):
    """What was there when the download began."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self._arrays = arrays

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> list[NDArray[Any]]:
        return self._arrays

    def waiter(self) -> Callable[[], None]:
        return lambda: None


def check_gpu(index: int) -> None:
    """Raises ConfigError, naming what is missing, when the kernels cannot run on this GPU."""
    if not torch.cuda.is_available():
        build = torch.version.cuda
        reason = (
            f"torch {torch.__version__} is built without CUDA"
            if build is None
            else f"torch finds no usable GPU (it is built for CUDA {build}; is the driver recent enough?)"
        )
        raise ConfigError(f"device='cuda': {reason}; use device='cpu'")
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"device='cuda': {torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}, "
            f"and the kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more; use device='cpu'"
        )
    properties: Any = torch.cuda.get_device_properties(index)
    needed = MAX_SHARED[architecture_of(torch.device("cuda", index))]
    if properties.shared_memory_per_block_optin < needed:
        raise ConfigError(
            f"device='cuda': {torch.cuda.get_device_name(index)} has {properties.shared_memory_per_block_optin} bytes of shared "
            f"memory for a program, and the kernels for compute capability {capability[0]}.{capability[1]} may take {needed}; "
            f"use device='cpu'"
        )
