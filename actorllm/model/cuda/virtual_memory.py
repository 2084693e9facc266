"""Addresses of a device that stay while the memory behind them is given back: the driver's virtual memory, called by ctypes.

A `Region` reserves addresses for its whole life. Memory is created in pieces, mapped there, and may be unmapped and given back.
So whatever holds these addresses, as a graph does, is right again once there is memory behind them. Until then, touching them is
an error of the device. `Driver` makes the calls; one that fails raises `DriverError`, which names the call and its code.

Tensors of a region hold its addresses, as tensors hold their memory. With the last of them and the region, both are given back.
Not thread-safe: owned by the runner, through its device.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from actorllm.errors import EngineError

PIECE_BYTES = 64 << 20
"""Of a region: what is created, mapped and copied at a time, rounded up to what the driver can map."""

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""

_PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED."""
_ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
_READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
_RECOMMENDED = 1
"""CU_MEM_ALLOC_GRANULARITY_RECOMMENDED."""
_HAS_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_SIZE, _ADDRESS, _WORD = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ulonglong
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_SIZE), ctypes.POINTER(_Properties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_ADDRESS), _SIZE, _SIZE, _ADDRESS, _WORD),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemCreate": (ctypes.POINTER(_WORD), _SIZE, ctypes.POINTER(_Properties), _WORD),
    "cuMemRelease": (_WORD,),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _WORD, _WORD),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemSetAccess": (_ADDRESS, _SIZE, ctypes.POINTER(_Access), _SIZE),
}


class DriverError(EngineError):
    """A call of the driver that failed. code: of CUDA; 0: it could not be made."""

    def __init__(self, what: str, code: int = 0) -> None:
        super().__init__(what)
        self.code = code


class Driver:
    """The driver's calls for the memory of one device."""

    def __init__(self, index: int, library: str = "libcuda.so.1") -> None:
        """index: of the device, as the driver counts. Raises DriverError: there is no driver, or it cannot do this."""
        self.index = index
        self.held_bytes = 0
        """Of memory that was created and not given back."""
        self.reserved: dict[int, int] = {}
        """Bytes by their first address."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"the driver's library cannot be loaded: {error}") from None
        is_there = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(is_there), _HAS_VIRTUAL_MEMORY, index)
        if not is_there.value:
            raise DriverError(f"GPU {index} has no virtual memory management")
        self._location = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        granularity = _SIZE()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            _RECOMMENDED,
        )
        self.granularity = int(granularity.value)
        """What sizes and addresses of mapped memory are multiples of."""

    def _call(self, name: str, *arguments: Any, what: str = "") -> None:
        """Raises DriverError, which names the call, what it was made for, and the code."""
        told = f"{name}{' ' if what else ''}{what} on GPU {self.index}"
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(f"{told} cannot be called: the driver does not have it; install a newer one") from None
        function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_int
        code = int(function(*arguments))
        if code:
            raise DriverError(f"{told} failed: {self._name_of(code)} ({code})", code)

    def _name_of(self, code: int) -> str:
        function, text = self._library.cuGetErrorName, ctypes.c_char_p()
        function.argtypes, function.restype = _SIGNATURES["cuGetErrorName"], ctypes.c_int
        if function(code, ctypes.byref(text)) or text.value is None:
            return "an error without a name"
        return text.value.decode(errors="replace")

    def reserve(self, num_bytes: int) -> int:
        """The first of so many addresses. num_bytes: a multiple of the granularity."""
        address = _ADDRESS()
        what = f"of {num_bytes} bytes"
        self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, self.granularity, 0, 0, what=what)
        self.reserved[int(address.value)] = num_bytes
        return int(address.value)

    def give_up(self, address: int) -> None:
        """Reserved addresses, behind which there is no memory."""
        self._call("cuMemAddressFree", address, self.reserved.pop(address))

    def has_reserved(self, address: int) -> bool:
        """Whether an address is one of those reserved here."""
        return any(first <= address < first + size for first, size in self.reserved.items())

    def create(self, num_bytes: int) -> int:
        """A handle of new memory."""
        handle = _WORD()
        self._call(
            "cuMemCreate",
            ctypes.byref(handle),
            num_bytes,
            ctypes.byref(self._properties),
            0,
            what=f"of {num_bytes} bytes",
        )
        self.held_bytes += num_bytes
        return int(handle.value)

    def release(self, handle: int, num_bytes: int) -> None:
        """Give memory back: at once, or when it is unmapped."""
        self._call("cuMemRelease", handle, what=f"of {num_bytes} bytes")
        self.held_bytes -= num_bytes

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Let the memory of a handle be at an address, for this device to read and write."""
        self._call("cuMemMap", address, num_bytes, 0, handle, 0, what=f"of {num_bytes} bytes")
        access = _Access(self._location, _READ_WRITE)
        try:
            self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(access), 1, what=f"to {num_bytes} bytes")
        except DriverError:
            with contextlib.suppress(DriverError):  # the first error says more
                self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        """What was mapped by one call."""
        self._call("cuMemUnmap", address, num_bytes, what=f"of {num_bytes} bytes")


class Addresses:
    """What tensors of a region are made of, and hold. Numpy and torch read it as an array of bytes."""

    def __init__(self, address: int, num_bytes: int, whole: Addresses | None = None) -> None:
        """whole: those that these are a part of, which stay as long as the part."""
        self.address, self.num_bytes = address, num_bytes
        self._whole = whole

    def part(self, start: int, num_bytes: int) -> Addresses:
        """num_bytes from the start-th on. Tensors of parts have storages of their own."""
        return Addresses(self.address + start, num_bytes, self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    __cuda_array_interface__ = __array_interface__


class Region:
    """See the module docstring."""

    def __init__(self, driver: Driver, num_bytes: int, wait: Callable[[], object]) -> None:
        """No memory is there yet. Raises DriverError.

        num_bytes: rounded up to the granularity of the driver. wait: until nothing is under way on the device.
        """
        size = driver.granularity
        num_bytes = max(1, -(-num_bytes // size)) * size
        self._pieces = _Pieces(driver, driver.reserve(num_bytes), num_bytes, wait)
        self.addresses = Addresses(self._pieces.address, num_bytes)
        end = weakref.finalize(self.addresses, self._pieces.close)
        end.atexit = False  # the driver does that when the process ends

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.addresses.address

    @property
    def num_bytes(self) -> int:
        """How many addresses there are."""
        return self.addresses.num_bytes

    @property
    def is_mapped(self) -> bool:
        """Whether there is memory behind all addresses."""
        return None not in self._pieces.handles

    def map(self, num_bytes: int | None = None) -> None:
        """Have new memory behind the first so many bytes; None: all. What is there stays as it is.

        Raises DriverError: then no memory was added.
        """
        self._pieces.map(self.num_bytes if num_bytes is None else min(num_bytes, self.num_bytes))

    def unmap(self) -> None:
        """Give the memory back, when nothing is under way on the device any more. Its contents are lost.

        Raises DriverError: then some memory may still be there. `map` adds what is missing, and this may be called again.
        """
        self._pieces.unmap()


class _Pieces:
    """The memory of a region. It does not hold the addresses, so that it can be given back when nothing else does."""

    def __init__(self, driver: Driver, address: int, num_bytes: int, wait: Callable[[], object]) -> None:
        self.address = address
        self._driver, self._num_bytes, self._wait = driver, num_bytes, wait
        self._size = -(-PIECE_BYTES // driver.granularity) * driver.granularity
        self.handles: list[int | None] = [None] * -(-num_bytes // self._size)
        """None: a piece without memory."""

    def _place(self, number: int) -> tuple[int, int]:
        """Of a piece, its address and its size."""
        start = number * self._size
        return self.address + start, min(self._size, self._num_bytes - start)

    def map(self, num_bytes: int) -> None:
        """As `Region.map`."""
        added = []
        try:
            for number in range(-(-num_bytes // self._size)):
                if self.handles[number] is None:
                    self._map(number)
                    added.append(number)
        except DriverError:
            for number in added:
                with contextlib.suppress(DriverError):  # the first error says more
                    self._unmap(number)
            raise

    def _map(self, number: int) -> None:
        first, size = self._place(number)
        handle = self._driver.create(size)
        try:
            self._driver.map(first, size, handle)
        except DriverError:
            with contextlib.suppress(DriverError):  # the first error says more
                self._driver.release(handle, size)
            raise
        self.handles[number] = handle

    def unmap(self) -> None:
        """As `Region.unmap`."""
        self._wait()
        for number, handle in enumerate(self.handles):
            if handle is not None:
                self._unmap(number)

    def _unmap(self, number: int) -> None:
        (first, size), handle = self._place(number), self.handles[number]
        assert handle is not None
        self._driver.unmap(first, size)
        self.handles[number] = None
        self._driver.release(handle, size)

    def close(self) -> None:
        """No tensor has these addresses any more. Nothing can be done about an error."""
        with contextlib.suppress(DriverError, RuntimeError):  # of the driver, and of torch
            self.unmap()
            self._driver.give_up(self.address)
