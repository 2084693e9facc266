"""`PlanChannel`: what rank 0 tells the others, over torch.distributed (gloo), in the order in which all of them compute.

A message is two broadcasts: its kind and size, then its bytes (`messages.pack`). The collectives of the
steps between two messages are of the same group, so that every rank enters all of them in one order. Nothing is pickled.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import orjson
import torch

from actorllm.errors import EngineDeadError
from actorllm.messages import Message, pack, unpack


class Told(enum.IntEnum):
    """Kinds of messages."""

    ALLOCATE = 1
    """The KV cache gets so many blocks."""
    PLAN = 2
    LATE_INPUTS = 3
    END = 4
    """Of a call of the application: what it has brought."""


class PlanChannel:
    """group: of torch.distributed; None: the default one. is_alone: there is one rank, and no message is sent."""

    def __init__(self, group: Any = None, *, is_alone: bool = False) -> None:
        self._group = group
        self._is_alone = is_alone

    def tell(self, kind: Told, body: bytes) -> None:
        """Of rank 0."""
        if self._is_alone:
            return
        self._broadcast(torch.tensor([int(kind), len(body)], dtype=torch.int64))
        if body:
            self._broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def hear(self) -> tuple[Told, bytes]:
        """Of every other rank: the next message. Raises EngineDeadError when rank 0 is gone."""
        header = torch.zeros(2, dtype=torch.int64)
        try:
            self._broadcast(header)
            body = torch.zeros(int(header[1]), dtype=torch.uint8)
            if len(body):
                self._broadcast(body)
        except RuntimeError as error:  # what torch.distributed raises
            raise EngineDeadError(f"rank 0, which schedules, is gone: {error}") from error
        return Told(int(header[0])), body.numpy().tobytes()

    def least(self, number: int) -> int:
        """The smallest number of all ranks."""
        if self._is_alone:
            return number
        import torch.distributed as dist

        found = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._group)
        return int(found.item())

    def _broadcast(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        dist.broadcast(tensor, 0, group=self._group)


def bytes_of(message: Message) -> bytes:
    """A message of the engine."""
    kind, scalars, arrays = pack(message)
    described = [[array.dtype.str, array.size] for array in arrays]
    text = orjson.dumps([kind, scalars, described], option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join((len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays)))


def message_of(body: bytes) -> Any:
    """The message again, with arrays of its own."""
    at = 8 + int.from_bytes(body[:8], "little")
    kind, scalars, described = orjson.loads(body[8:at])
    arrays = []
    for dtype, size in described:
        arrays.append(np.frombuffer(body, dtype, size, at).copy())
        at += arrays[-1].nbytes
    return unpack(kind, scalars, arrays)
