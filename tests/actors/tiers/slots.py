"""Blocks, keys and files of them for tests."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.tiers.slot_file import KEY_BYTES, PAGE, SlotFile

SLOT = 1000
FINGERPRINT = bytes(range(32))
Key = NDArray[np.uint64]


def key(number: int) -> Key:
    return np.frombuffer(random.Random(number).randbytes(KEY_BYTES), np.uint64)


def block(number: int) -> list[memoryview]:
    """In pieces of several sizes."""
    data = memoryview(bytearray(random.Random(1000 + number).randbytes(SLOT)))
    return [data[:1], data[1:700], data[700:]]


def empty() -> list[memoryview]:
    data = memoryview(bytearray(SLOT))
    return [data[:300], data[300:]]


def content(views: list[memoryview]) -> bytes:
    return b"".join(views)


def make(path: Path | str, num_slots: int = 64, fingerprint: bytes = FINGERPRINT) -> SlotFile:
    file = SlotFile(str(path), fingerprint, SLOT, num_slots * (SLOT + 52) + 2 * PAGE)
    assert file.num_slots == num_slots
    return file
