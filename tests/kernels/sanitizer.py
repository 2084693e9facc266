"""A sanitizer for kernels in Triton's interpreter: races between programs, accesses outside of a tensor, bad alignment.

The programs of a launch run one after the other, in a random order. Every access is checked against the extent of the tensors
that the launch was given (a view's, and not its memory's), and against the size of what is read. Two accesses of one address by
different programs are a race if one of them writes and nothing orders them. Atomic operations order: a program that
counts an address up sees what those did that had counted it before.

It cannot see races within a program (shared memory, barriers): those are in compiled code only.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

NEVER = -1
EPOCHS = 256
"""A stamp is the number of a program, times this, plus how many atomic operations it had done."""


class Shadow:
    """Of a piece of memory: which program has last written and read each byte."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.end = begin, begin + size
        self.writer, self.reader = (np.full(size, NEVER, np.int64) for _ in range(2))
        self.is_atomic = np.zeros(size, np.bool_)
        """It was written by an atomic operation."""


@dataclass
class Sanitizer:
    """What was found, in words: `findings`."""

    rng: random.Random
    findings: list[str] = field(default_factory=list)
    _kernel: str = ""
    _extents: list[tuple[int, int]] = field(default_factory=list)
    _shadows: list[Shadow] = field(default_factory=list)
    _order: list[tuple[int, int, int]] = field(default_factory=list)
    _program: int = 0
    _epochs: dict[int, int] = field(default_factory=dict)
    _known: dict[int, dict[int, int]] = field(default_factory=dict)
    """program -> of other programs, up to which epoch it sees what they did."""
    _released: dict[int, dict[int, int]] = field(default_factory=dict)
    """address -> what a program sees that does an atomic operation there."""

    def begin(self, kernel: str, tensors: list[torch.Tensor], grid: tuple[int, ...]) -> None:
        self._kernel = kernel
        self._extents = [_extent(tensor) for tensor in tensors]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self._shadows = [Shadow(begin, size) for begin, size in storages.items()]
        ids = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        self._order = self.rng.sample(ids, len(ids))
        self._program = NEVER
        self._epochs, self._known, self._released = {}, {}, {}

    def next_program(self) -> tuple[int, int, int]:
        self._program += 1
        self._epochs[self._program], self._known[self._program] = 0, {}
        return self._order[self._program]

    def access(self, kind: str, pointers: Any, mask: Any) -> None:
        """kind: read, write or atomic."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.asarray(pointers.data).reshape(-1).astype(np.int64)
        if mask is not None:
            is_meant = np.broadcast_to(np.asarray(mask.data), np.shape(pointers.data)).reshape(-1).astype(bool)
            addresses = addresses[is_meant]
        if not addresses.size:
            return
        is_inside = np.zeros(addresses.size, np.bool_)
        for begin, end in self._extents:
            is_inside |= (addresses >= begin) & (addresses + size <= end)
        if not is_inside.all():
            self._find(f"{(~is_inside).sum()} addresses of a {kind} are outside of every tensor")
            addresses = addresses[is_inside]
        if (addresses % size).any():
            self._find(f"addresses of a {kind} are no multiples of {size}")
        for shadow in self._shadows:
            here = addresses[(addresses >= shadow.begin) & (addresses < shadow.end)]
            if here.size:
                self._note(kind, shadow, ((here - shadow.begin)[:, None] + np.arange(size)).reshape(-1))
        if kind == "atomic":
            self._synchronize(addresses)

    def _note(self, kind: str, shadow: Shadow, at: NDArray[np.int64]) -> None:
        others = shadow.writer[at]
        if kind == "atomic":
            others = others[~shadow.is_atomic[at]]
        self._compare(kind, "write", others)
        if kind != "read":
            self._compare(kind, "read", shadow.reader[at])
        stamp = self._program * EPOCHS + self._epochs[self._program]
        if kind == "read":
            shadow.reader[at] = stamp
        else:
            shadow.writer[at] = stamp
            shadow.is_atomic[at] = kind == "atomic"

    def _compare(self, kind: str, other_kind: str, stamps: NDArray[np.int64]) -> None:
        known = self._known[self._program]
        for stamp in np.unique(stamps[stamps != NEVER]).tolist():
            program, epoch = divmod(stamp, EPOCHS)
            if program != self._program and known.get(program, NEVER) < epoch:
                self._find(f"a {kind} of one program and a {other_kind} of another are not ordered")
                return

    def _synchronize(self, addresses: NDArray[np.int64]) -> None:
        mine = self._known[self._program]
        for address in addresses.tolist():
            released = self._released.setdefault(address, {})
            _merge(mine, released)
            _merge(released, {**mine, self._program: self._epochs[self._program]})
        self._epochs[self._program] += 1

    def _find(self, what: str) -> None:
        self.findings.append(f"{self._kernel}: {what}")


def _merge(into: dict[int, int], other: dict[int, int]) -> None:
    for program, epoch in other.items():
        into[program] = max(into.get(program, NEVER), epoch)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


@contextmanager
def sanitized(seed: int = 0) -> Iterator[Sanitizer]:
    """Launches in the interpreter are watched."""
    sanitizer = Sanitizer(random.Random(seed))
    call, number = GridExecutor.__call__, interpreter_builder.set_grid_idx
    load, store, rmw = (
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        InterpreterBuilder.create_atomic_rmw,
    )

    def launch(self: Any, *arguments: Any, **more: Any) -> None:
        bound = inspect.signature(self.fn).bind_partial(
            *arguments, **{name: value for name, value in more.items() if name in inspect.signature(self.fn).parameters}
        )
        tensors = [value for value in bound.arguments.values() if isinstance(value, torch.Tensor)]
        sanitizer.begin(self.fn.__name__, tensors, tuple(self.grid) + (1,) * (3 - len(self.grid)))
        call(self, *arguments, **more)

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        sanitizer.access("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        sanitizer.access("write", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def watched_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        sanitizer.access("atomic", pointers, mask)
        return rmw(self, operation, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setattr(interpreter_builder, "set_grid_idx", lambda *_: number(*sanitizer.next_program()))
        patch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", watched_rmw)
        yield sanitizer
