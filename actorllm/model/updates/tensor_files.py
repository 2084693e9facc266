"""`TensorFile`: tensors in memory that the workers of this user map, in the format of safetensors; and which of several count.

A worker reads such a file like one of a checkpoint. So names, shapes and types are checked by the code that loads a model, whatever
its weights are fused, sharded or quantized to. The file has no name and goes with the program that owns the engine. Imports torch.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load

from actorllm.errors import CorruptModelError, InvalidParameterError, shown
from actorllm.types.params import is_text

MAX_NAME = 1000
"""Characters of the name of a tensor."""
ALIGNMENT = 64
"""Of the first tensor of a file and of each other one, in bytes."""
PIECE_BYTES = 64 << 20
"""That are written at a time."""

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""As safetensors calls them."""


class SharedMemory(Protocol):
    """Memory that other processes of this user open by its path (`actors.memory_file`)."""

    fd: int

    @property
    def path(self) -> str: ...
    def close(self) -> None: ...


NewMemory: TypeAlias = Callable[[int], SharedMemory]
"""Makes one of so many bytes. Raises OSError for want of memory or descriptors."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a file. data: its bytes, uint8 [num_bytes]."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class TensorFile:
    """Some tensors in a memory file. Nothing is written to it once it is made."""

    def __init__(self, tensors: Mapping[str, TensorRecord], new_memory: NewMemory) -> None:
        """Raises OSError."""
        self._new_memory = new_memory
        header: dict[str, Any] = {}
        at = 0
        for name, record in tensors.items():
            header[name] = {
                "dtype": record.dtype,
                "shape": list(record.shape),
                "data_offsets": [at, at + record.data.size],
            }
            at += record.data.size
        text = orjson.dumps(header)
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        start = 8 + len(text)
        self._file = new_memory(start + at)
        try:
            self._write(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8), 0)
            for name, record in tensors.items():
                self._write(record.data, start + header[name]["data_offsets"][0])
        except BaseException:
            self._file.close()
            raise
        self.records = {
            name: (r.dtype, r.shape, start + header[name]["data_offsets"][0]) for name, r in tensors.items()
        }
        """Type, shape and first byte of each."""
        self._num_bytes = start + at

    @classmethod
    def opened(cls, file: SharedMemory, new_memory: NewMemory) -> TensorFile:
        """That of another process. Raises OSError."""
        self = cls.__new__(cls)
        self._file, self._new_memory = file, new_memory
        length = int.from_bytes(os.pread(file.fd, 8, 0), "little")
        header = orjson.loads(os.pread(file.fd, length, 8))
        self.records = {
            name: (told["dtype"], tuple(told["shape"]), 8 + length + told["data_offsets"][0])
            for name, told in header.items()
        }
        self._num_bytes = os.fstat(file.fd).st_size
        return self

    def _write(self, data: NDArray[np.uint8], at: int) -> None:
        """A write fills whole pages, which a mapping would have cleared before, and takes half of the processor time."""
        done = 0
        while done < data.size:
            done += os.pwrite(self._file.fd, data[done : done + PIECE_BYTES].data, at + done)

    @property
    def path(self) -> str:
        """Under which workers open it."""
        return self._file.path

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.records)

    def without(self, names: Iterable[str]) -> TensorFile:
        """A file of the other tensors."""
        dropped = set(names)
        sizes = {name: _num_bytes(dtype, shape) for name, (dtype, shape, _) in self.records.items()}
        with mmap.mmap(self._file.fd, self._num_bytes, access=mmap.ACCESS_READ) as memory:
            whole = np.frombuffer(memory, np.uint8).copy()
        kept = {
            name: TensorRecord(dtype, shape, whole[start : start + sizes[name]])
            for name, (dtype, shape, start) in self.records.items()
            if name not in dropped
        }
        return TensorFile(kept, self._new_memory)

    def close(self) -> None:
        """No worker can open it any more; those that read it keep what they have. Idempotent."""
        self._file.close()


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    of_name = {name: kind for kind, name in DTYPES.items()}
    return int(np.prod(shape, dtype=np.int64)) * of_name[dtype].itemsize


def file_of_tensors(tensors: object, new_memory: NewMemory) -> TensorFile:
    """The tensors of a caller, by name, copied. Raises InvalidParameterError, naming the tensor; OSError."""
    if not isinstance(tensors, Mapping):
        raise InvalidParameterError(
            f"tensors={shown(tensors)} must be a mapping from names to tensors, such as model.state_dict()"
        )
    if not tensors:
        raise InvalidParameterError("tensors is empty; give at least one tensor by its name in the checkpoint")
    return TensorFile({_checked_name(name): _record_of(name, value) for name, value in tensors.items()}, new_memory)


def tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    """Those of a safetensors file. Reads it, and does not map it: it may be cut short meanwhile.

    Raises OSError; CorruptModelError: it is none.
    """
    data = path.read_bytes()
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise CorruptModelError(f"{path} is no safetensors file that can be read: {error}") from error
    return tensors


def _checked_name(name: object) -> str:
    if not is_text(name) or not 0 < len(str(name)) <= MAX_NAME or name == "__metadata__":
        raise InvalidParameterError(
            f"tensor name {shown(name)} must be a string of valid Unicode with 1 to {MAX_NAME} characters"
        )
    return str(name)


def _record_of(name: object, value: object) -> TensorRecord:
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.require(value, requirements=("C", "W")))  # torch has no negative strides
        except (TypeError, ValueError) as error:
            raise InvalidParameterError(f"tensor {shown(name)}: {error}") from None
    if not isinstance(value, torch.Tensor):
        raise InvalidParameterError(
            f"tensor {shown(name)} is {type(value).__name__}; give a torch.Tensor or a numpy array"
        )
    if value.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise InvalidParameterError(f"tensor {shown(name)} is {value.dtype}; give one of {known}")
    if value.layout is not torch.strided:
        raise InvalidParameterError(f"tensor {shown(name)} is {value.layout}; give a dense tensor")
    if hasattr(value, "full_tensor"):
        raise InvalidParameterError(
            f"tensor {shown(name)} is in parts over processes; give what its full_tensor() returns"
        )
    try:
        plain = value.detach().cpu().resolve_neg().contiguous()
        return TensorRecord(DTYPES[plain.dtype], tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy())
    # A tensor on "meta" has no data, and a subclass of Tensor may refuse each of these calls.
    except (RuntimeError, TypeError) as error:
        raise InvalidParameterError(f"tensor {shown(name)} cannot be read: {str(error)[:200]}") from error


def layered(old: Iterable[TensorFile], new: Iterable[TensorFile]) -> tuple[list[TensorFile], list[TensorFile]]:
    """The files that count once the new ones are laid over the old ones, and those that do not count any more.

    Each tensor counts once. So what is kept does not grow with the number of updates.
    """
    laid = list(new)
    kept: list[TensorFile] = []
    dropped: list[TensorFile] = []
    covered: set[str] = set()
    for file in reversed([*old, *laid]):
        hidden = covered & file.names
        covered |= file.names
        if not hidden:
            kept.append(file)
            continue
        dropped.append(file)
        if hidden != file.names:
            kept.append(file.without(hidden))
    return kept[::-1], dropped
