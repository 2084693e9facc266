"""The tensors of a loaded model in one region of a device (`virtual_memory`): their memory goes and comes, and addresses stay.

`SleepingWeights` finds every tensor below a model and moves it, so that all tensors of one piece of memory stay so. The objects are
the same ones afterwards, in other memory. What is done with them later, as recording a graph, is done with addresses that stay.
Falling asleep copies them to the host and gives the memory back. What is read again from elsewhere need not be copied. Owned by the
runner, which is told by `model.runner` when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from actorllm.model.cuda.adapters import DeviceAdapted
from actorllm.model.cuda.collectives import Collectives
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.virtual_memory import PIECE_BYTES

ALIGNMENT = 512
"""Bytes at a multiple of which memory of torch's allocator begins, too: builds of kernels go by it."""

TRIMMED_BYTES = 512 << 20
"""Of weights that are moved, after which what they have left is given back: else all would be in memory twice."""

BESIDE: dict[type, tuple[str, ...]] = {DeviceAdapted: ("down", "up")}
"""What stays where it is: adapters may be put into their slots while the weights sleep."""


@dataclass(slots=True)
class MovedMemory:
    """Memory that some tensors share, by the addresses before and after it was moved."""

    start: int
    end: int
    tensors: list[torch.Tensor]
    offset: int = 0
    """In the region."""


class SleepingWeights:
    """See the module docstring."""

    @torch.inference_mode()
    def __init__(self, device: Device, model: object) -> None:
        """model: with its weights, and with nothing yet of what steps need. Raises DriverError."""
        self._device = device
        self._blocks = list(_blocks(device, model))
        size = 0
        for block in self._blocks:
            block.offset = size
            size += -(-(block.end - block.start) // ALIGNMENT) * ALIGNMENT
        self._region = device.reserve(size)
        self._region.map(1)
        self._bytes = device.bytes_of(self._region.addresses)
        self._kept: list[tuple[int, torch.Tensor]] | None = None
        """While they sleep, copies of parts by their places in the region."""
        self.lacks_weights = False
        """Some were not copied, and are to be read again."""
        moved = 0
        for block in self._blocks:
            self._move(block)
            moved += block.end - block.start
            if moved >= TRIMMED_BYTES:
                device.wait_for_all()
                device.trim()
                moved = 0

    def _move(self, block: MovedMemory) -> None:
        size = block.end - block.start
        self._region.map(block.offset + size)
        one = block.tensors[0]
        first = block.start - one.untyped_storage().data_ptr()
        source = torch.empty(0, dtype=torch.uint8, device=one.device)
        source.set_(one.untyped_storage(), first, (size,), (1,))
        # A storage of its own: a copy of all that a tensor shares its memory with has no other weights.
        moved = self._device.bytes_of(self._region.addresses.part(block.offset, size))
        moved.copy_(source)
        for tensor in block.tensors:
            offset = (tensor.data_ptr() - block.start) // tensor.element_size()
            tensor.set_(moved.untyped_storage(), offset, tensor.shape, tensor.stride())
        block.start, block.end = self._region.address + block.offset, self._region.address + block.offset + size

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(block.end - block.start for block in self._blocks)

    @property
    def is_asleep(self) -> bool:
        """Whether their memory was given back, or was to be."""
        return self._kept is not None

    @torch.inference_mode()
    def fall_asleep(self, dropped: Iterable[torch.Tensor] = ()) -> None:
        """Give the memory back; nothing may be under way. dropped: what is not copied, as the caller has it elsewhere.

        Raises RuntimeError or MemoryError: the host has no memory, and nothing has changed. DriverError: `wake_up` mends it.
        """
        if self.is_asleep:
            return
        gone = {_span(tensor) for tensor in dropped}
        kept = []
        self._device.wait_for_all()
        for start, end in self._runs(gone):
            for at in range(start, end, PIECE_BYTES):
                part = self._bytes[at : min(at + PIECE_BYTES, end)]
                kept.append((at, self._device.host_bytes(len(part))))
                kept[-1][1].copy_(part, non_blocking=True)
        self._device.wait_for_all()
        self._kept, self.lacks_weights = kept, bool(gone)
        self._region.unmap()

    def _runs(self, gone: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Parts of the region, as long as possible, without the blocks that one of these spans covers."""
        start = end = 0
        for block in self._blocks:
            if (block.start, block.end) in gone:
                if start < end:
                    yield start, end
                start = end = block.offset + -(-(block.end - block.start) // ALIGNMENT) * ALIGNMENT
            else:
                end = block.offset + block.end - block.start
        if start < end:
            yield start, end

    @torch.inference_mode()
    def wake_up(self) -> None:
        """Take memory again, with what was copied. Raises DriverError: they go on sleeping, and may be woken again."""
        if self._kept is not None:
            self._region.map()
            self._copy_back(self._kept)
            self._kept = None
            self._device.trim()

    def _copy_back(self, kept: list[tuple[int, torch.Tensor]]) -> None:
        for at, part in kept:
            self._bytes[at : at + len(part)].copy_(part, non_blocking=True)
        self._device.wait_for_all()


def _blocks(device: Device, model: object) -> Iterator[MovedMemory]:
    """The memory of every tensor below a model on this device that is not in a region yet; what overlaps is one block."""
    found: list[tuple[int, int, torch.Tensor]] = []
    for tensor in tensors_below(model):
        is_here = tensor.device == device.torch_device and tensor.numel() > 0
        if is_here and not device.has_reserved(tensor.data_ptr()):
            found.append((*_span(tensor), tensor))
    block: MovedMemory | None = None
    for start, end, tensor in sorted(found, key=lambda one: one[:2]):
        if block is not None and start < block.end:
            block.end = max(block.end, end)
            block.tensors.append(tensor)
            continue
        if block is not None:
            yield block
        block = MovedMemory(start, end, [tensor])
    if block is not None:
        yield block


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor: of its first byte, and behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def tensors_below(model: object) -> list[torch.Tensor]:
    """Every tensor that is reached from an object through ours, through modules of torch and through containers, but `BESIDE`."""
    seen: dict[int, object] = {}
    tensors: list[torch.Tensor] = []
    waiting = [model]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, torch.nn.Module) or _is_ours(one):
            waiting += _parts(one)
    return tensors


def _is_ours(one: object) -> bool:
    return type(one).__module__.startswith("actorllm") and not isinstance(one, Device | Collectives | type)


def _parts(one: object) -> Iterator[object]:
    beside = BESIDE.get(type(one), ())
    slots = (name for cls in type(one).__mro__ for name in cls.__dict__.get("__slots__", ()))
    for name in {*slots, *getattr(one, "__dict__", ())}:
        if name not in beside and hasattr(one, name):
            yield getattr(one, name)
