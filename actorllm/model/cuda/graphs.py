"""Decode steps recorded as graphs, one per number of rows that is in use.

A step of n rows runs as one of the next larger size, filled up with rows of no slot. Sizes are recorded when they are wanted:
the smallest and the largest at the start, the others while the worker has nothing to do, or between two steps once one
has been launched kernel by kernel for MAX_MISSES times. Recording launches nothing, so requests do not notice; but every
kernel must have been compiled before, which is why a part is launched once, for rows of no slot, before it is recorded.

Owned by the runner, which says what the launches are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from enum import Enum

from actorllm.model.cuda.device import Device, Replay

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Denser where a row more costs most. Above, a step is launched kernel by kernel."""

MAX_MISSES = 16
"""Steps of a size that are launched kernel by kernel before it is recorded in between."""


class Part(Enum):
    """What is recorded."""

    HEAD = "head"
    """A whole step, sampled by the product with the LM head."""
    LOGITS = "logits"
    """A whole step, sampled from logits."""
    FORWARD = "forward"
    """A step up to its logits; what is done to them comes from the host."""
    CHOICE = "choice"
    """From there to the tokens."""


Key = tuple[Part, int]


def sizes_for(max_rows: int) -> tuple[int, ...]:
    """The sizes of an engine with so many rows at most: that number is one of them, unless it is above the largest."""
    return tuple(size for size in SIZES if size < max_rows) + ((max_rows,) if max_rows <= SIZES[-1] else ())


class DecodeGraphs:
    """The recorded steps, and which are wanted."""

    def __init__(self, device: Device, launch: Callable[[Part, int], None], max_rows: int, *, is_on: bool) -> None:
        """launch: makes the launches of a part for so many rows. is_on False: nothing is recorded (enforce_eager)."""
        self.sizes = sizes_for(max_rows)
        self.is_on = is_on
        self.num_replays = 0
        self.num_launched = 0
        """Parts that were launched kernel by kernel."""
        self._device, self._launch = device, launch
        self._replays: dict[Key, Replay] = {}
        self._misses: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._replays

    def size_for(self, num_rows: int) -> int:
        """How many rows a step of so many is launched with."""
        at = bisect_left(self.sizes, num_rows)
        return self.sizes[at] if at < len(self.sizes) else num_rows

    def run(self, part: Part, size: int) -> None:
        """Launch the part, as a graph if it is one."""
        key = (part, size)
        replay = self._replays.get(key)
        if replay is not None:
            self.num_replays += 1
            replay()
            return
        self.num_launched += 1
        self._launch(part, size)
        if self.is_on and size <= SIZES[-1]:
            misses = self._misses[key] = self._misses.get(key, 0) + 1
            if misses > MAX_MISSES:
                self._record(key)  # its kernels have just been launched: they are compiled

    def want(self, part: Part, size: int) -> None:
        """Record this one when there is time."""
        if self.is_on and (part, size) not in self._replays:
            self._misses.setdefault((part, size), 0)

    def next_wanted(self) -> Key | None:
        """What `record` should be called with next: what was missed most."""
        return max(self._misses, key=lambda key: self._misses[key]) if self._misses else None

    def record(self, key: Key) -> None:
        """Between steps, with rows of no slot in place: they are launched once if that has never been done."""
        if not self._misses.get(key):
            self._launch(*key)
        self._record(key)

    def _record(self, key: Key) -> None:
        self._replays[key] = self._device.capture(lambda: self._launch(*key))
        self._misses.pop(key, None)
