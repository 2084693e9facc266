"""Memory of a device that is given back under addresses that stay, on a driver's library with memory of the host."""

from __future__ import annotations

import ctypes
import gc
import re
import signal

import pytest
import torch

from actorllm.model.cuda import virtual_memory
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.virtual_memory import Driver, DriverError, Region
from tests.model.cuda import host_memory
from tests.model.cuda.host_memory import PIECE, HostMemory, library, signal_of, sleeping

pytestmark = [
    pytest.mark.skipif(host_memory.COMPILER is None, reason="needs a C compiler for the driver's library"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),  # of fork
]


@pytest.fixture
def device(memory: HostMemory) -> HostDevice:
    return sleeping(HostDevice)


def test_memory_goes_and_comes_under_addresses_that_stay(memory: HostMemory, device: HostDevice) -> None:
    region = device.reserve(3 * PIECE + 1)
    assert region.num_bytes == 4 * PIECE, "whole pages of the driver"
    assert (memory.held, device.resident_bytes()) == (0, 0), "addresses take no memory"
    region.map(PIECE + 1)
    assert memory.held == 2 * PIECE
    assert not region.is_mapped
    region.map()
    region.map()
    assert region.is_mapped
    assert memory.held == device.resident_bytes() == 4 * PIECE
    tensor = device.bytes_of(region.addresses)
    assert tensor.data_ptr() == region.address
    tensor.fill_(7)
    region.unmap()
    region.unmap()
    assert memory.held == device.resident_bytes() == 0
    assert device.has_reserved(region.address + 4 * PIECE - 1)
    assert not device.has_reserved(region.address + 4 * PIECE)
    region.map()
    assert tensor.data_ptr() == region.address
    assert not tensor.any(), "other memory"
    tensor[-1] = 1
    assert tensor.sum() == 1


def test_what_was_given_back_cannot_be_touched(device: HostDevice) -> None:
    region = device.reserve(2 * PIECE)
    region.map()
    last = region.address + 2 * PIECE - 1

    def touch() -> None:
        ctypes.string_at(last, 1)

    assert signal_of(touch) == 0
    region.unmap()
    assert signal_of(touch) == signal.SIGSEGV


def test_tensors_hold_their_addresses(memory: HostMemory, device: HostDevice) -> None:
    region = device.reserve(PIECE)
    region.map()
    part = device.bytes_of(region.addresses.part(8, 8)).view(torch.int64)
    assert (part.data_ptr(), part.untyped_storage().nbytes()) == (region.address + 8, 8)
    del region
    gc.collect()
    part[0] = 5
    assert part.item() == 5
    assert memory.held == PIECE
    del part
    assert (memory.held, memory.num_ranges, device.resident_bytes()) == (0, 0, 0)


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_is_named_and_leaves_what_there_was(
    name: str, memory: HostMemory, device: HostDevice
) -> None:
    region = device.reserve(4 * PIECE)
    region.map(1)
    memory.fail(name, 2)
    with pytest.raises(DriverError, match=rf"{name} .* on GPU 0 failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)") as raised:
        region.map()
    assert raised.value.code == virtual_memory.OUT_OF_MEMORY
    assert memory.held == device.resident_bytes() == PIECE
    region.map()
    assert memory.held == device.resident_bytes() == 4 * PIECE


@pytest.mark.parametrize("name", ["cuMemUnmap", "cuMemRelease"])
def test_memory_that_cannot_be_given_back_is_mapped_again(name: str, memory: HostMemory, device: HostDevice) -> None:
    region = device.reserve(4 * PIECE)
    region.map()
    memory.fail(name, 1, 999)
    with pytest.raises(DriverError, match=rf"{name} of {PIECE} bytes on GPU 0 failed: CUDA_ERROR_UNKNOWN \(999\)"):
        region.unmap()
    assert 0 < memory.held < 4 * PIECE
    region.map()
    device.bytes_of(region.addresses).fill_(1)
    region.unmap()
    lost = PIECE if name == "cuMemRelease" else 0  # what is not mapped any more, and not released
    assert memory.held == lost
    if lost:
        handle = next(one for one in range(1, 6) if not memory._library.cuMemRelease(ctypes.c_ulonglong(one)))
        assert handle == 2


def test_a_want_of_memory(memory: HostMemory, device: HostDevice) -> None:
    memory.limit(2 * PIECE)
    region = device.reserve(3 * PIECE)
    with pytest.raises(
        DriverError, match=r"cuMemCreate of 65536 bytes on GPU 0 failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"
    ):
        region.map()
    assert memory.held == 0
    memory.limit(3 * PIECE)
    region.map()


def test_what_cannot_be_reserved(memory: HostMemory, device: HostDevice) -> None:
    memory.fail("cuMemAddressReserve", code=1)
    with pytest.raises(DriverError, match=r"cuMemAddressReserve of 65536 bytes .* CUDA_ERROR_INVALID_VALUE \(1\)"):
        device.reserve(1)
    with pytest.raises(DriverError, match="no virtual memory"):
        HostDevice().reserve(1)


@pytest.mark.parametrize("name", ["cuDeviceGetAttribute", "cuMemGetAllocationGranularity"])
def test_a_driver_that_cannot_be_asked(name: str, memory: HostMemory) -> None:
    memory.fail(name, code=3)
    with pytest.raises(DriverError, match=rf"{name} on GPU 0 failed: an error without a name \(3\)"):
        Driver(0, library())


def test_drivers_without_virtual_memory(memory: HostMemory) -> None:
    memory.support(False)
    with pytest.raises(DriverError, match="GPU 1 has no virtual memory management"):
        Driver(1, library())
    with pytest.raises(DriverError, match=re.escape("the driver's library cannot be loaded: ")):
        Driver(0, "libnothing.so.1")
    with pytest.raises(DriverError, match=r"cuDeviceGetAttribute on GPU 0 cannot be called: .* install a newer one"):
        Driver(0, "libm.so.6")


def test_a_region_that_is_given_up_waits_for_the_device(memory: HostMemory) -> None:
    waits: list[int] = []
    region = Region(Driver(0, library()), 1, lambda: waits.append(memory.held))
    region.map()
    region.unmap()
    region.map()
    del region
    assert waits == [PIECE, PIECE]
