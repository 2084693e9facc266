"""`DelayedDevice`: an emulated device that is late, as a GPU is.

Everything that is launched waits in one queue, as in a stream. It is done when the host waits for an event behind it, or in pieces
at random moments before. Until then every result is poison: not a number, or a number that is no index. So a host that reads a
result too early, or changes memory that a copy still has to read, gives other tokens. A value that is read inside of a step is
an error.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from actorllm.model.cuda import host_graph, ops
from actorllm.model.cuda.device import Download, HostDevice
from actorllm.model.cuda.virtual_memory import Driver

POISON = -(2**30)


class DelayedDevice(HostDevice):
    """See the module docstring. seed: of the moments at which work is done."""

    def __init__(self, seed: int, driver: Driver | None = None) -> None:
        super().__init__(driver=driver)
        self.num_launched = self.num_done = 0
        self.is_late = False
        """Before that, as while weights are loaded, everything is done at once."""
        self._rng = random.Random(seed)
        self._queue: deque[Callable[[], None]] = deque()
        self._is_active = False
        self._lock = threading.Lock()  # an engine waits for steps in another thread

    def launch(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.num_launched += 1

    def work_until(self, number: int) -> None:
        """Do the first so many launches of all, in their order."""
        with self._lock, _disable_current_modes(), torch.inference_mode():
            while self.num_done < number:
                self._queue.popleft()()
                self.num_done += 1

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if self._is_active or not self.is_late:
            yield
            return
        self._is_active = True
        queue: Any = _Launches(self)
        token = ops._launches.set(queue)
        try:
            with _Delay(self):
                yield
        finally:
            ops._launches.reset(token)
            self._is_active = False
            self.work_until(self._rng.randint(self.num_done, self.num_launched) if self._rng.random() < 0.5 else 0)

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        if not self.is_late:
            return super().upload(array)
        pinned = torch.from_numpy(np.array(array))  # a copy of the host's own, which may change at once
        with _disable_current_modes():
            tensor = poisoned(pinned)
        self.launch(lambda: tensor.copy_(pinned))  # type: ignore[arg-type,return-value]
        return tensor

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        if not self.is_late:
            return super().download(tensors)
        with _disable_current_modes():
            copies = [poisoned(tensor) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            self.launch(lambda copy=copy, tensor=tensor: copy.copy_(tensor))  # type: ignore[misc]
        return DelayedDownload(self, copies)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.work_until(self.num_launched)
        with _disable_current_modes(), host_graph.recording() as nodes:
            launch()

        def replay() -> None:
            for node in nodes:
                if self.is_late:
                    self.launch(node)
                else:
                    node()

        return replay

    def wait_for_all(self) -> None:
        self.work_until(self.num_launched)


class DelayedDownload(Download):
    """Copies that are there when the device has come so far."""

    def __init__(self, device: DelayedDevice, copies: list[torch.Tensor]) -> None:
        self._device, self._copies, self._number = device, copies, device.num_launched

    @property
    def is_done(self) -> bool:
        return self._device.num_done >= self._number

    def wait(self) -> list[NDArray[Any]]:
        self._device.work_until(self._number)
        return [copy.numpy() for copy in self._copies]

    def waiter(self) -> Callable[[], None]:
        return lambda: self._device.work_until(self._number)


class _Launches:
    """The list that `ops` notes launches in."""

    def __init__(self, device: DelayedDevice) -> None:
        self._device = device

    def append(self, work: Callable[[], None]) -> None:
        self._device.launch(work)


class _Delay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations of torch wait in the queue, too. Views are made at once: they read nothing."""

    def __init__(self, device: DelayedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if func.overloadpacket.__name__ in host_graph.READS:
            raise RuntimeError(f"{func} reads a value inside of a step")
        if schema.is_mutable:
            self._device.launch(lambda: func(*args, **kwargs))
            written = [
                kwargs.get(argument.name, args[i] if i < len(args) else None)
                for i, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return written[0] if len(schema.returns) < 2 else tuple(written)
        if any(one.alias_info is not None for one in schema.returns):
            view = func(*args, **kwargs)
            if _storages(view) <= _storages((args, kwargs)):
                return view  # and no copy, as `to` may make
        shapes = func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
        out = tree_map(poisoned, shapes)
        results = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]

        def work() -> None:
            found = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, torch.Tensor)]
            for result, value in zip(results, found, strict=True):
                result.copy_(value)

        self._device.launch(work)
        return out


def _storages(values: Any) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in tree_leaves(values) if isinstance(one, torch.Tensor)}


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def poisoned(like: Any) -> Any:
    """A tensor of the same form that holds nothing of worth."""
    if not isinstance(like, torch.Tensor):
        return like
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    if like.dtype == torch.bool:
        return tensor.fill_(True)
    if like.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    return tensor.fill_(POISON if like.dtype.itemsize >= 4 else 77)
