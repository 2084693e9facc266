"""What of a GPU's device can be held without one: what it asks of torch, and in which order."""

from __future__ import annotations

import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorllm.errors import ConfigError
from actorllm.model.cuda.device import CudaDevice, CudaDownload, check_gpu
from actorllm.model.cuda.virtual_memory import Addresses, DriverError
from actorllm_kernels.configs import MAX_SHARED, architecture_of


class Graph:
    """A graph of torch's, as it behaves when a capture is broken."""

    is_broken = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert not gc.isenabled()
        self.pool = pool

    def capture_end(self) -> None:
        if self.is_broken:
            raise RuntimeError("capture invalidated")

    def replay(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    graphs: list[Graph] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Graph()) or graphs[-1])
    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    device = object.__new__(CudaDevice)
    device.__dict__.update(torch_device=torch.device("cuda", 0), _pool=None, _abandoned=[], graphs=graphs)
    return device


def test_a_broken_capture_says_what_broke_it_and_the_next_one_has_a_pool_of_its_own(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.capture(list)
    device.capture(list)

    def fail() -> None:
        raise ValueError("a launch that is not permitted")

    monkeypatch.setattr(Graph, "is_broken", True)
    with pytest.raises(ValueError, match="not permitted"):
        device.capture(fail)
    with pytest.raises(RuntimeError, match="capture invalidated"):
        device.capture(list)
    monkeypatch.setattr(Graph, "is_broken", False)
    device.capture(list)
    first, second, broken, invalid, last = (graph.pool for graph in device.graphs)
    assert first == second == broken
    assert len({broken, invalid, last}) == 3
    assert gc.isenabled()


def test_who_waits_for_a_download_does_not_hold_it() -> None:
    waited = []
    copies = [torch.zeros(2)]
    download = CudaDownload(copies, SimpleNamespace(synchronize=lambda: waited.append(1)))
    wait, copy = download.waiter(), weakref.ref(copies[0])
    copies.clear()
    del download
    assert copy() is None
    wait()
    assert waited == [1]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_a_gpu_without_room_for_the_kernels_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """In shared memory: launches would fail, one after the other."""
    index = 40 + capability[0]
    properties = SimpleNamespace(shared_memory_per_block_optin=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Something")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    needed = MAX_SHARED[architecture_of(torch.device("cuda", index))]
    properties.shared_memory_per_block_optin = needed - 1
    with pytest.raises(
        ConfigError, match=f"NVIDIA Something has {needed - 1} bytes of shared memory .* may take {needed}"
    ):
        check_gpu(index)
    properties.shared_memory_per_block_optin = needed
    check_gpu(index)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"compute capability 7\.5, and the kernels need 8\.0"):
        check_gpu(index)


def figures(device: Any) -> tuple[int, ...]:
    return device.foreign_bytes(), device.held_bytes(), device.peak_bytes(), device.resident_bytes()


def test_memory_at_reserved_addresses_is_that_of_this_process(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not count it, and the driver counts it as taken."""
    told = {"memory_reserved": 300, "memory_allocated": 250, "max_memory_allocated": 280, "mem_get_info": (100, 1000)}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert figures(device) == (600, 250, 280, 300)
    device._driver = SimpleNamespace(held_bytes=200)
    assert figures(device) == (400, 450, 480, 500)


def test_copies_on_the_host_are_pinned_where_that_is_possible(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[bool] = []
    empty = torch.empty

    def allocate(*shape: int, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        wishes.append(pin_memory)
        if pin_memory and len(wishes) > 1:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", allocate)
    for _ in range(2):
        assert device.host_bytes(8).nbytes == 8
    assert wishes == [True, True, False]


def test_tensors_at_reserved_addresses_are_no_copies(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would be given back with nothing, and what is recorded would hold its addresses."""
    there, copy = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    addresses = Addresses(there.data_ptr(), 8)
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: there if data is addresses else None)
    assert device.bytes_of(addresses) is there
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: copy)
    with pytest.raises(DriverError, match="makes a copy of memory at addresses that are reserved"):
        device.bytes_of(addresses)
