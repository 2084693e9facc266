"""Frames of any size on a stream socket, as a child reads and writes them: the length in eight bytes, and so many bytes.

Blocking, and without an import that takes time; the owner's side is in `owned_process`.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Sequence
from typing import Any

NUM_LENGTH_BYTES = 8


def receive_whole(control: socket.socket) -> bytearray | None:
    """The next frame; None: the owner is gone."""
    length = _read(control, NUM_LENGTH_BYTES)
    return None if length is None else _read(control, int.from_bytes(length, "little"))


def _read(control: socket.socket, number: int) -> bytearray | None:
    received = bytearray(number)
    with memoryview(received) as view:
        at = 0
        while at < number:
            size = control.recv_into(view[at:])
            if not size:
                return None
            at += size
    return received


def send_whole(control: socket.socket, parts: Sequence[bytes | array[Any]]) -> None:
    """One frame of several parts."""
    total = sum(memoryview(part).nbytes for part in parts)
    control.sendall(total.to_bytes(NUM_LENGTH_BYTES, "little"))
    for part in parts:
        control.sendall(memoryview(part).cast("B"))
