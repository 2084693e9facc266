"""`TensorFile`: tensors in memory for the workers of this user, which map them (`MappedTensors`); and which of several files count.

A worker takes the tensors of such a file as those of a checkpoint. So names, shapes and types are checked by the code that loads a
model, whatever its weights are fused, sharded or quantized to. The file has no name and goes with the program that owns the engine.
Its format is that of safetensors, but several tensors may share their bytes. It is locked while it is written. A reader has a lock
as long as one of its tensors lives, and no file is written again before. Imports torch.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load

from actorllm.errors import CorruptModelError, EngineError, InvalidParameterError, shown
from actorllm.model.threads import num_cores
from actorllm.types.params import is_text

MAX_NAME = 1000
"""Characters of the name of a tensor."""
ALIGNMENT = 64
"""Of the first tensor of a file, in bytes."""
PIECE_BYTES = 8 << 20
"""That a thread writes at a time."""
MAX_WRITERS = 4
"""Threads; more of them would wait for the memory."""
METADATA = "__metadata__"

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
TORCH_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class SharedMemory(Protocol):
    """Memory that other processes of this user open by its path (`actors.memory_file`)."""

    fd: int

    @property
    def path(self) -> str: ...
    def write(self, data: NDArray[np.uint8], at: int) -> None:
        """Bytes from the at-th on. On any thread; OSError for want of memory."""

    def close(self) -> None: ...


NewMemory: TypeAlias = Callable[[int], SharedMemory]
"""Makes one of so many bytes. Raises OSError for want of memory or descriptors."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a file. data: its bytes, uint8 [num_bytes]."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class Layout(NamedTuple):
    """One of the tensors that another process is to write, which lie in their order and without gaps."""

    name: str
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.dtype, self.shape)


class TensorFile:
    """Some tensors in a memory file. Nothing is written to it once it is made."""

    def __init__(self, tensors: Mapping[str, TensorRecord], new_memory: NewMemory) -> None:
        """Tensors with the same memory are written once. Raises OSError."""
        self._new_memory = new_memory
        header: dict[str, Any] = {}
        places: dict[tuple[int, int], int] = {}
        pieces: list[tuple[NDArray[np.uint8], int]] = []
        end = 0
        for name, record in tensors.items():
            size = record.data.size
            at = places.setdefault((record.data.ctypes.data, size), end) if size else end
            header[name] = {"dtype": record.dtype, "shape": list(record.shape), "data_offsets": [at, at + size]}
            if at == end:
                pieces += ((record.data[i : i + PIECE_BYTES], at + i) for i in range(0, size, PIECE_BYTES))
                end += size
        text = _head_of(header)
        start = len(text)
        self._num_bytes = start + end
        self._file = new_memory(self._num_bytes)
        try:
            fcntl.flock(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.write(np.frombuffer(text, np.uint8), 0)
            self._write_all([(data, start + at) for data, at in pieces])
            fcntl.flock(self._file.fd, fcntl.LOCK_UN)
        except BaseException:
            self._file.close()
            raise
        self.records = {
            name: (r.dtype, r.shape, start + header[name]["data_offsets"][0]) for name, r in tensors.items()
        }
        """Type, shape and first byte of each."""

    @classmethod
    def opened(cls, file: SharedMemory, new_memory: NewMemory) -> TensorFile:
        """That of another process. Raises OSError."""
        self = cls.__new__(cls)
        self._file, self._new_memory = file, new_memory
        length = int.from_bytes(os.pread(file.fd, 8, 0), "little")
        self.records = _records_of(os.pread(file.fd, length, 8))
        self._num_bytes = os.fstat(file.fd).st_size
        return self

    @classmethod
    def laid_out(cls, layout: Sequence[Layout], new_memory: NewMemory) -> TensorFile:
        """Room for tensors, which another process writes (`TensorRoom`) before anything reads them. Raises OSError."""
        self = cls.__new__(cls)
        self._new_memory = new_memory
        header: dict[str, Any] = {}
        end = 0
        for name, dtype, shape in layout:
            size = _num_bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = _head_of(header)
        self._num_bytes = len(text) + end
        self._file = new_memory(self._num_bytes)
        try:
            self._file.write(np.frombuffer(text, np.uint8), 0)
            fcntl.flock(self._file.fd, fcntl.LOCK_UN)  # memory that is kept has a lock; the writer takes one
        except BaseException:
            self._file.close()
            raise
        self.records = {
            one.name: (one.dtype, one.shape, len(text) + header[one.name]["data_offsets"][0]) for one in layout
        }
        return self

    def _write_all(self, pieces: list[tuple[NDArray[np.uint8], int]]) -> None:
        """On several threads where there is much to write."""
        if sum(data.size for data, _ in pieces) <= PIECE_BYTES:
            for piece in pieces:
                self._file.write(*piece)
            return
        with ThreadPoolExecutor(min(MAX_WRITERS, num_cores()), "actorllm:weights") as threads:
            for writing in [threads.submit(self._file.write, *piece) for piece in pieces]:
                writing.result()

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
        # Unmapped with the last array.
        whole = np.frombuffer(mmap.mmap(self._file.fd, self._num_bytes, access=mmap.ACCESS_READ), np.uint8)
        kept = {
            name: TensorRecord(dtype, shape, whole[start : start + _num_bytes(dtype, shape)])
            for name, (dtype, shape, start) in self.records.items()
            if name not in dropped
        }
        return TensorFile(kept, self._new_memory)

    def close(self) -> None:
        """No worker can open it any more; those that read it keep what they have. Idempotent."""
        self._file.close()


class TensorRoom:
    """A file of `TensorFile.laid_out`, in a process that brings its tensors. Locked until it is closed, if it is written to."""

    def __init__(self, path: str, *, is_written: bool) -> None:
        """Raises EngineError: it is not on this machine, or another process writes to it."""
        self._fd = -1
        try:
            self._fd = os.open(path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC)
            if is_written:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
            records = _records_of(os.pread(self._fd, length, 8))
        except OSError as error:
            self.close()
            raise EngineError(
                f"the memory for the new weights cannot be opened: {error}; tensors reach replicas of one machine only, others are "
                f"updated from a folder"
            ) from error
        self.layout = [Layout(name, dtype, shape) for name, (dtype, shape, _) in records.items()]
        self._at = 8 + length

    def write(self, data: NDArray[np.uint8]) -> None:
        """The next bytes. Raises OSError for want of memory."""
        done = 0
        while done < data.size:
            done += os.pwrite(self._fd, data[done:].data, self._at + done)
        self._at += done

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> TensorRoom:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MappedTensors:
    """The tensors of such a file of another process: views of its memory, which stays as it is while one of them lives."""

    def __init__(self, path: str) -> None:
        """Raises CorruptModelError: it cannot be read, or it is written to at this moment."""
        try:
            with open(path, "rb", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the mapping keeps it
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            length = int.from_bytes(memory[:8], "little")
            self.records = _records_of(memory[8 : 8 + length])
            """Type, shape and first byte of each."""
            ends = (start + _num_bytes(kind, shape) for kind, shape, start in self.records.values())
            if 8 + length > len(memory) or any(end > len(memory) for end in ends):
                raise ValueError("it is too short for its tensors")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptModelError(f"{path} cannot be read: {error}") from error
        self._data = torch.frombuffer(memory, dtype=torch.uint8)

    def tensor(self, name: str) -> torch.Tensor:
        """A caller that keeps it keeps all of the file."""
        kind, shape, start = self.records[name]
        data = self._data[start : start + _num_bytes(kind, shape)]
        dtype = TORCH_TYPES[kind]
        if start % dtype.itemsize:  # behind a tensor of smaller numbers
            data = data.clone()
        return data.view(dtype).reshape(shape)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is a view of this memory."""
        return tensor.untyped_storage().data_ptr() == self._data.untyped_storage().data_ptr()


def _head_of(header: Mapping[str, Any]) -> bytes:
    """What a file of safetensors begins with."""
    text = orjson.dumps(header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _records_of(header: bytes) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Type, shape and first byte of each tensor, as a header of safetensors says. Raises ValueError, KeyError and the like."""
    start = 8 + len(header)
    return {
        name: (told["dtype"], tuple(told["shape"]), start + told["data_offsets"][0])
        for name, told in orjson.loads(header).items()
        if name != METADATA
    }


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * TORCH_TYPES[dtype].itemsize


def file_of_tensors(tensors: object, new_memory: NewMemory) -> TensorFile:
    """The tensors of a caller, by name, copied. Raises InvalidParameterError, naming the tensor; OSError."""
    if not isinstance(tensors, Mapping):
        raise InvalidParameterError(
            f"tensors={shown(tensors)} must be a mapping from names to tensors, such as model.state_dict()"
        )
    if not tensors:
        raise InvalidParameterError("tensors is empty; give at least one tensor by its name in the checkpoint")
    return TensorFile({checked_name(name): _record_of(name, value) for name, value in tensors.items()}, new_memory)


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


def checked_name(name: object) -> str:
    if not is_text(name) or not 0 < len(str(name)) <= MAX_NAME or name == METADATA:
        raise InvalidParameterError(
            f"tensor name {shown(name)} must be a string of valid Unicode with 1 to {MAX_NAME} characters"
        )
    return str(name)


def checked_tensor(name: object, value: object) -> torch.Tensor:
    """What a caller gives as a tensor, of a type that weights have. Raises InvalidParameterError, naming it."""
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
    return value


def _record_of(name: object, value: object) -> TensorRecord:
    tensor = checked_tensor(name, value)
    try:
        plain = tensor.detach().cpu().resolve_neg().contiguous()
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
