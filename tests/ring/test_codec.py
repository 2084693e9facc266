"""Bodies: round trips, one valid form, and nothing but CorruptLinkError for everything else."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from actorllm.errors import CorruptLinkError
from actorllm.ring import codec
from actorllm.ring.codec import DTYPES, LARGE_BYTES, MAX_ARRAYS, decode, encode
from tests.effort import examples

QUICK = settings(max_examples=examples(50, 150), deadline=None, derandomize=True, database=None)

SCALARS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@st.composite
def array_lists(draw: st.DrawFn) -> list[NDArray[Any]]:
    arrays = []
    for _ in range(draw(st.integers(0, 16))):
        dtype = draw(st.sampled_from(DTYPES))
        size = draw(st.sampled_from([0, 1, 3, 7, 100, 2 * LARGE_BYTES // dtype.itemsize, 5001]))
        step = draw(st.sampled_from([1, 1, 2, -1]))
        seed = draw(st.integers(0, 255))
        base = np.frombuffer((bytes(range(256)) * (abs(step) * size * dtype.itemsize // 256 + 2))[seed:], np.uint8)
        arrays.append(base[: size * abs(step) * dtype.itemsize].view(dtype)[::step])
    return arrays


def body_of(scalars: object, arrays: list[NDArray[Any]]) -> bytes:
    return b"".join(encode(scalars, arrays))


@QUICK
@given(scalars=SCALARS, arrays=array_lists(), wrap=st.sampled_from([bytes, bytearray, memoryview]))
def test_round_trip(scalars: Any, arrays: list[NDArray[Any]], wrap: Any) -> None:
    body = body_of(scalars, arrays)
    got_scalars, got = decode(wrap(body))
    assert got_scalars == scalars
    assert len(got) == len(arrays)
    for sent, received in zip(arrays, got, strict=True):
        assert received.dtype == sent.dtype
        assert received.tobytes() == sent.tobytes()
        assert not received.flags.writeable
        if received.size:
            address = received.__array_interface__["data"][0]
            assert (
                address - np.frombuffer(body, np.uint8).__array_interface__["data"][0]
            ) % 8 == 0 or wrap is not bytes
            assert received.flags.aligned


@QUICK
@given(scalars=SCALARS, arrays=array_lists(), data=st.data())
def test_a_truncated_body_is_refused(scalars: Any, arrays: list[NDArray[Any]], data: st.DataObject) -> None:
    body = body_of(scalars, arrays)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(CorruptLinkError):
        decode(body[:cut])
    with pytest.raises(CorruptLinkError):
        decode(body + b"\0")


@QUICK
@given(scalars=SCALARS, arrays=array_lists(), flips=st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_a_damaged_body_raises_or_decodes_to_something_of_its_size(
    scalars: Any, arrays: list[NDArray[Any]], flips: list[int]
) -> None:
    """A flip inside an array is the checksum's to find; a flip anywhere must not lead outside the body."""
    body = bytearray(body_of(scalars, arrays))
    region = len(body) if len(body) < 4096 else 256
    for flip in flips:
        body[flip // 8 % region] ^= 1 << flip % 8
    try:
        _, got = decode(bytes(body))
    except CorruptLinkError:
        return
    assert sum(array.nbytes for array in got) <= len(body)


@QUICK
@given(body=st.binary(max_size=200))
def test_arbitrary_bytes_do_no_more_than_raise(body: bytes) -> None:
    try:
        decode(body)
    except CorruptLinkError:
        return


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, 2**32 - 1, "scalars end"),
        (4, 2**16 - 1 | 1 << 16, "arrays"),
        (4, 1 | 2 << 16, "version 2"),
        (8, 15 << 28 | 3, "dtype code 15"),
        (8, 0 << 28 | 4, "elements"),
        (8, (1 << 28) - 1, "elements"),
        (8, 1 << 28 | 3, "ends at byte"),
        (12, 0, "at 0"),
        (12, 25, "at 25"),
        (12, 2**32 - 8, "elements at"),
    ],
)
def test_every_field_is_checked(position: int, value: int, message: str) -> None:
    body = bytearray(body_of([7], [np.arange(3, dtype=np.int32)]))
    struct.pack_into("<I", body, position, value)
    with pytest.raises(CorruptLinkError, match=message):
        decode(bytes(body))


@pytest.mark.parametrize("text", [b"[7", b"{]", b"\xff\xff", b"NaN", b"[" * 5000 + b"]" * 5000, b""])
def test_scalars_that_are_not_json(text: bytes) -> None:
    with pytest.raises(CorruptLinkError, match="not JSON"):
        decode(struct.pack("<IHH", len(text), 0, codec.VERSION) + text)


def test_arrays_are_views_of_the_body() -> None:
    body = body_of({}, [np.arange(1000, dtype=np.int32)])
    array = decode(body)[1][0]
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))


def test_large_arrays_are_not_copied_by_encode() -> None:
    large = np.arange(LARGE_BYTES, dtype=np.int32)
    small = np.arange(3, dtype=np.uint8)
    buffers = encode([1], [small, large, large, small])
    views = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
    assert len(views) == 2
    assert all(np.shares_memory(np.frombuffer(view, np.int32), large) for view in views)
    _, arrays = decode(b"".join(buffers))
    assert [array.size for array in arrays] == [3, LARGE_BYTES, LARGE_BYTES, 3]


def test_numpy_scalars_travel() -> None:
    assert decode(body_of([np.int32(3), np.float64(0.5)], []))[0] == [3, 0.5]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2), np.int32),
        np.array(3),
        np.zeros(2, ">i4"),
        np.zeros(2, np.complex64),
        np.zeros(2, bool),
        np.zeros(2, object),
        np.array(["text"]),
    ],
)
def test_other_arrays_are_refused(array: NDArray[Any]) -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        encode({}, [array])


def test_limits() -> None:
    one = np.zeros(1, np.uint8)
    assert len(decode(body_of({}, [one] * MAX_ARRAYS))[1]) == MAX_ARRAYS
    with pytest.raises(TypeError, match="limit"):
        encode({}, [one] * (MAX_ARRAYS + 1))
    with pytest.raises(TypeError):
        encode({"a": object()})
