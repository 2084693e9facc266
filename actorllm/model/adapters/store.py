"""The adapters that a worker keeps: those in slots, which rows use, and those that were read and wait for a slot.

A worker does what its scheduler asks for. It reads a folder on a thread (`read`), and then fills a slot (`fill`). A slot is filled
on a thread as well where the backend takes that, and else between two steps. What it has read it keeps, up to `max_cpu_loras`,
and drops the one that was used longest ago. Pinned ones stay.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict

from actorllm.config import LoRAConfig
from actorllm.model.adapters import LowRank, Slots
from actorllm.model.adapters.reading import read_adapter
from actorllm.types.adapter_folder import Adapter

Tensors = dict[str, LowRank]


class Adapters:
    """See the module docstring. Only `read` and `fill` may be called from another thread than the worker's."""

    def __init__(self, config: LoRAConfig, slots: Slots) -> None:
        """slots: empty ones of the backend."""
        self.slots = slots
        self._config = config
        self._kept: OrderedDict[str, Tensors] = OrderedDict()
        """By digest, those used last at the end."""
        self._pinned: set[str] = set()
        self._in_slots: dict[int, str] = {}
        self._filling: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        """Of each slot: held while it is filled, and while it is asked for."""
        self._wanted: dict[int, str] = {}
        """What each slot is to hold. A new scheduler may have asked for another one than is being read."""

    @property
    def num_bytes(self) -> int:
        """Of the slots, and of as many adapters as may be kept."""
        per_slot = self.slots.num_bytes // self._config.max_loras
        return per_slot * (self._config.max_loras + self._config.max_cpu_loras)

    @property
    def digests(self) -> list[str]:
        """Of those that are kept."""
        return sorted(self._kept)

    @property
    def max_kept(self) -> int:
        """So many at a time (max_cpu_loras)."""
        return self._config.max_cpu_loras

    def want(self, slot: int, digest: str) -> bool:
        """From now on, a slot is to hold this one and no other. Returns whether it does."""
        with self._filling[slot]:
            self._wanted[slot] = digest
            return self._in_slots.get(slot) == digest

    def get(self, digest: str) -> Tensors | None:
        """One that is kept, which is the one used last from now on."""
        tensors = self._kept.get(digest)
        if tensors is not None:
            self._kept.move_to_end(digest)
        return tensors

    def read(self, adapter: Adapter) -> Tensors:
        """The tensors of a folder. Raises InvalidParameterError."""
        slots = self.slots
        return read_adapter(adapter, slots.targets, slots.max_rank, slots.dtype)

    def keep(self, digest: str, tensors: Tensors, is_pinned: bool = False) -> bool:
        """Keep what was read. Returns whether it is kept: it is not where all others are pinned."""
        self._kept[digest] = tensors
        self._kept.move_to_end(digest)
        if is_pinned:
            self._pinned.add(digest)
        if len(self._kept) > self._config.max_cpu_loras:
            oldest = next((one for one in self._kept if one not in self._pinned), digest)
            self._pinned.discard(oldest)
            del self._kept[oldest]
        return digest in self._kept

    def put(self, slot: int, digest: str, tensors: Tensors) -> None:
        """Fill a slot, which no row of a step to come uses."""
        self._in_slots.pop(slot, None)
        self.slots.put(slot, tensors)
        self._in_slots[slot] = digest

    def fill(self, slot: int, digest: str, tensors: Tensors) -> None:
        """Fill a slot, unless another adapter has been wanted there meanwhile: by a scheduler that came after a death."""
        with self._filling[slot]:
            if self._wanted.get(slot) == digest:
                self.put(slot, digest, tensors)

    def forget(self, digest: str) -> bool:
        """Keep it no longer; a slot that holds it goes on holding it. Whether it was kept."""
        self._pinned.discard(digest)
        return self._kept.pop(digest, None) is not None
