"""A message body: one JSON value for the scalars, and one-dimensional arrays as binary segments.

    +0 u32 bytes of JSON | +4 u16 number of arrays | +6 u16 version
    +8 per array: u32 dtype code << 28 | number of elements, u32 offset from the start of the body
    JSON | fill to 8 | array 0 | fill to 8 | array 1 ...            (no fill after the last part)

Little-endian. Every array starts at a multiple of 8, in the ring and in a copied frame. There is one valid form: offsets follow
from the sizes before them, and the last part ends where the body ends. So a truncated or damaged body is recognised from its
first bytes on. Owns this format; called by channel. Arrays decode to read-only views of the body: no element is copied or
converted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from actorllm.errors import CorruptLinkError

VERSION = 1
MAX_ARRAYS = 255
MAX_ELEMENTS = (1 << 28) - 1
DTYPES = tuple(np.dtype(name) for name in ("<i4", "|u1", "<i8", "<f4", "<u4", "<f8", "<i2", "<u2"))
"""By code. A code is never used again for something else."""

LARGE_BYTES = 8192
"""Arrays from here on are handed over as they are; smaller ones are joined, which is cheaper than one more buffer."""

_ENVELOPE = struct.Struct("<IHH")
_ENVELOPE_BYTES = 8
_TABLES = [struct.Struct(f"<{2 * count}I") for count in range(MAX_ARRAYS + 1)]
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_DTYPE_OF_CODE: tuple[np.dtype[Any] | None, ...] = DTYPES + (None,) * (16 - len(DTYPES))
_ITEM_BYTES = tuple(0 if dtype is None else dtype.itemsize for dtype in _DTYPE_OF_CODE)
_FILL = tuple(bytes(count) for count in range(8))
_EMPTY = tuple(None if dtype is None else np.frombuffer(b"", dtype) for dtype in _DTYPE_OF_CODE)


def encode(scalars: object, arrays: Sequence[NDArray[Any]] = ()) -> list[bytes | memoryview]:
    """The body as buffers to be written one after the other. Large arrays are views: do not change them before that.

    scalars: what orjson can write (numpy scalars too; NaN and infinity become null). TypeError for anything else, and
    for an array that is not one-dimensional or of a dtype that is not listed.
    """
    text = orjson.dumps(scalars, option=orjson.OPT_SERIALIZE_NUMPY)
    count = len(arrays)
    if not count:
        return [_ENVELOPE.pack(len(text), 0, VERSION) + text]
    if count > MAX_ARRAYS:
        raise TypeError(f"{count} arrays in one message; {MAX_ARRAYS} is the limit")
    position = _ENVELOPE_BYTES + 8 * count + len(text)
    table: list[int] = []
    pieces: list[Any] = [b"", text]
    for array in arrays:
        code, size = _CODES.get(array.dtype), array.size
        if code is None or array.ndim != 1 or size > MAX_ELEMENTS:
            raise TypeError(f"an array of {array.dtype} and shape {array.shape} cannot travel")
        # Every array begins at a multiple of 8, so that the reader can use it in place.
        fill = -position & 7
        if fill:
            pieces.append(_FILL[fill])
            position += fill
        table.append(code << 28 | size)
        table.append(position)
        position += array.nbytes
        pieces.append(array)
    pieces[0] = _ENVELOPE.pack(len(text), count, VERSION) + _TABLES[count].pack(*table)
    # Small pieces are joined, since each buffer costs a call; large ones go into the ring without a copy here.
    if position < LARGE_BYTES:
        return [_join(pieces)]
    large = [i for i, piece in enumerate(pieces) if type(piece) is not bytes and piece.nbytes >= LARGE_BYTES]
    if not large:
        return [_join(pieces)]
    buffers: list[bytes | memoryview] = []
    start = 0
    for index in large:
        if index > start:
            buffers.append(_join(pieces[start:index]))
        buffers.append(np.ascontiguousarray(pieces[index]).data.cast("B"))
        start = index + 1
    if start < len(pieces):
        buffers.append(_join(pieces[start:]))
    return buffers


def _join(pieces: list[Any]) -> bytes:
    try:
        return b"".join(pieces)
    except TypeError:  # a strided array exports no plain bytes; looking at every array's strides would cost all of them
        return b"".join([p if isinstance(p, bytes) else np.ascontiguousarray(p).data for p in pieces])


def decode(body: bytes | bytearray | memoryview) -> tuple[Any, list[NDArray[Any]]]:
    """`(scalars, arrays)`; the arrays are read-only views that keep `body` alive. CorruptLinkError: not a body.

    body: flat bytes.
    """
    if type(body) is not bytes:
        body = memoryview(body).toreadonly()
    size = len(body)
    if size < _ENVELOPE_BYTES:
        raise CorruptLinkError(f"a body of {size} bytes has no envelope")
    text_bytes, count, version = _ENVELOPE.unpack_from(body)
    if version != VERSION:
        raise CorruptLinkError(f"body version {version}; this is version {VERSION}")
    if count > MAX_ARRAYS:
        raise CorruptLinkError(f"a body of {count} arrays")
    start = _ENVELOPE_BYTES + 8 * count
    end = start + text_bytes
    # Sizes are the peer's words: each is checked against the body before it is used.
    if end > size or (not count and end != size):
        raise CorruptLinkError(f"the scalars end at byte {end} of {size}")
    try:
        scalars = orjson.loads(body[start:end])
    except orjson.JSONDecodeError as error:
        raise CorruptLinkError(f"the scalars are not JSON: {error}") from error
    if not count:
        return scalars, []
    table = _TABLES[count].unpack_from(body, _ENVELOPE_BYTES)
    arrays: list[NDArray[Any]] = []
    for index in range(0, 2 * count, 2):
        word = table[index]
        code = word >> 28
        elements = word & MAX_ELEMENTS
        dtype = _DTYPE_OF_CODE[code]
        # There is one valid offset for each array; the table must name it.
        offset = (end + 7) & -8
        end = offset + elements * _ITEM_BYTES[code]
        if dtype is None or offset != table[index + 1] or end > size:
            raise CorruptLinkError(f"array {index // 2}: dtype code {code}, {elements} elements at {table[index + 1]}")
        arrays.append(np.frombuffer(body, dtype, elements, offset) if elements else _EMPTY[code])
    if end != size:
        raise CorruptLinkError(f"the body ends at byte {end} of {size}")
    return scalars, arrays
