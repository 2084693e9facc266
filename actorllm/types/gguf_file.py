"""The header of a GGUF file: its fields, and where its tensors are. Everything that a header counts is bounded before it is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Standard library only; the package `gguf` knows the layouts of
blocks, and is needed where tensors are read.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from actorllm.errors import CorruptModelError, UnsupportedModelError

MAGIC = b"GGUF"

VERSIONS = (2, 3)

MAX_FIELDS = 1 << 12

MAX_TENSORS = 1 << 16

MAX_ITEMS = 1 << 22
"""Of one array, such as the merges of a tokenizer."""

MAX_TEXT = 1 << 22
"""Bytes of one text, such as a chat template."""

MAX_NAME = 256

MAX_DEPTH = 2
"""Of arrays within arrays."""

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9

KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
"""Types of tensors that are read: name, numbers of a block, bytes of a block."""

NOT_READ = {
    9: "Q8_1",
    15: "Q8_K",
    19: "IQ1_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Other types, by name for messages."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is, and what it holds."""

    shape: tuple[int, ...]
    """As in torch: the last one is contiguous."""
    kind: int
    """A number of `KINDS`."""
    start: int
    """In the file."""
    num_bytes: int

    @property
    def name_of_kind(self) -> str:
        return KINDS[self.kind][0]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says before its tensors."""

    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Raises CorruptModelError or UnsupportedModelError, with the field or tensor and its value."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file, os.fstat(file.fileno()).st_size).header()
    except OSError as error:
        raise CorruptModelError(f"{path} cannot be read: {error}") from error


class _Reader:
    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self._path, self._file, self._left, self._size = path, file, size, size

    def header(self) -> GgufHeader:
        if self._bytes(4, "its magic number") != MAGIC:
            raise CorruptModelError(f"{self._path} is no GGUF file: it does not begin with {MAGIC.decode()!r}")
        version = self._number("I", "its version")
        if version not in VERSIONS:
            raise UnsupportedModelError(f"{self._path}: GGUF version {version} is not supported; 2 and 3 are")
        num_tensors = self._count("its number of tensors", MAX_TENSORS)
        num_fields = self._count("its number of fields", MAX_FIELDS)
        fields: dict[str, Any] = {}
        for index in range(num_fields):
            name = self._text(f"the name of field {index}", MAX_NAME)
            if name in fields:
                raise self._corrupt(f"field {name!r} is there twice")
            fields[name] = self._value(self._number("I", f"the type of {name!r}"), f"field {name!r}")
        found = [self._tensor(index) for index in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= 1 << 20:
            raise self._corrupt(f"field 'general.alignment' is {alignment!r}, a size of at least 1 is needed")
        begin = -(-(self._size - self._left) // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset, num_bytes in found:
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} is there twice")
            if begin + offset + num_bytes > self._size:
                raise self._corrupt(
                    f"tensor {name!r} ends {begin + offset + num_bytes - self._size} bytes behind the file"
                )
            tensors[name] = GgufTensor(shape, kind, begin + offset, num_bytes)
        return GgufHeader(fields, tensors)

    def _tensor(self, index: int) -> tuple[str, tuple[int, ...], int, int, int]:
        name = self._text(f"the name of tensor {index}", MAX_NAME)
        where = f"tensor {name!r}"
        num_dimensions = self._number("I", f"the dimensions of {where}")
        if not 1 <= num_dimensions <= 4:
            raise self._corrupt(f"{where} has {num_dimensions} dimensions, 1 to 4 are read")
        shape = tuple(self._number("Q", f"the shape of {where}") for _ in range(num_dimensions))[::-1]
        kind, offset = self._number("I", f"the type of {where}"), self._number("Q", f"the offset of {where}")
        if kind not in KINDS:
            known = ", ".join(sorted(entry[0] for entry in KINDS.values()))
            told = f"{NOT_READ[kind]}" if kind in NOT_READ else f"number {kind}"
            raise UnsupportedModelError(f"{self._path}: {where} is of type {told}, which is not supported; {known} are")
        _, block, block_bytes = KINDS[kind]
        num_numbers = math.prod(shape)
        if not all(shape) or num_numbers > 1 << 40 or shape[-1] % block:
            raise self._corrupt(f"{where} has shape {shape}, and rows of {KINDS[kind][0]} are in blocks of {block}")
        return name, shape, kind, offset, num_numbers // block * block_bytes

    def _value(self, kind: int, where: str, depth: int = 0) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind], where)
        if kind == TEXT:
            return self._text(where, MAX_TEXT)
        if kind != ARRAY or depth == MAX_DEPTH:
            raise self._corrupt(f"{where} is of type {kind}, which is not known here")
        inner = self._number("I", f"the type of {where}")
        smallest = struct.calcsize(NUMBERS[inner]) if inner in NUMBERS else 8
        count = self._count(f"the length of {where}", min(MAX_ITEMS, self._left // smallest))
        if inner in NUMBERS:
            return list(struct.unpack(f"<{count}{NUMBERS[inner]}", self._bytes(count * smallest, where)))
        return [self._value(inner, where, depth + 1) for _ in range(count)]

    def _count(self, what: str, limit: int) -> int:
        value: int = self._number("Q", what)
        if value > limit:
            raise self._corrupt(f"{what} is {value}, at most {limit} can be")
        return value

    def _text(self, what: str, limit: int) -> str:
        data = self._bytes(self._count(f"the length of {what}", limit), what)
        return data.decode("utf-8", "replace")

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(form), what))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        data = self._file.read(count) if count <= self._left else b""
        if len(data) != count:
            raise self._corrupt(f"it ends within {what}")
        self._left -= count
        return data

    def _corrupt(self, reason: str) -> CorruptModelError:
        return CorruptModelError(f"{self._path} is a corrupt GGUF file: {reason}")
