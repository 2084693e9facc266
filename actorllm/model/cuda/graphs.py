"""Decode steps recorded as graphs, one per number of rows that is in use.

A step of n rows runs as one of the next larger size, filled up with rows of no slot. Sizes are recorded when they are wanted.
The smallest and the largest are recorded at the start, the others while the worker has nothing to do. A size is recorded between
two steps once it has been launched kernel by kernel for MAX_MISSES times. Recording launches nothing, but it takes the loop's
time. Every kernel must have been compiled before, so a part is launched once, for rows of no slot, before it is recorded.
What cannot be recorded is launched kernel by kernel for good.

Where rows may have adapters, each part with layers is there twice. One is for steps in which some row has an adapter. The other
launches what an engine without adapters would.

Owned by the runner, which says what the launches are.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from enum import Enum

from actorllm.model.cuda.device import Device, Replay

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Denser where a row more costs most. Above, a step is launched kernel by kernel."""

MAX_MISSES = 16
"""Steps of a size that are launched kernel by kernel before it is recorded in between."""


class GraphPart(Enum):
    """What is recorded."""

    HEAD = "head"
    """A whole step, sampled by the product with the LM head."""
    LOGITS = "logits"
    """A whole step, sampled from logits."""
    FORWARD = "forward"
    """A step up to its logits; what is done to them comes from the host."""
    CHOICE = "choice"
    """From there to the tokens."""
    MIXED = "mixed"
    """The forward of a step with prompts; its size is a number of tokens (`mixed`)."""
    ADAPTED_HEAD = "head, adapters"
    ADAPTED_LOGITS = "logits, adapters"
    ADAPTED_FORWARD = "forward, adapters"
    ADAPTED_MIXED = "mixed, adapters"

    def of_step(self, is_adapted: bool) -> GraphPart:
        """This part, plain, of a step in which some row has an adapter or none has."""
        return _ADAPTED.get(self, self) if is_adapted else self

    @property
    def is_adapted(self) -> bool:
        return self in _PLAIN

    @property
    def plain(self) -> GraphPart:
        """The part without adapters."""
        return _PLAIN.get(self, self)


_ADAPTED = {
    GraphPart.HEAD: GraphPart.ADAPTED_HEAD,
    GraphPart.LOGITS: GraphPart.ADAPTED_LOGITS,
    GraphPart.FORWARD: GraphPart.ADAPTED_FORWARD,
    GraphPart.MIXED: GraphPart.ADAPTED_MIXED,
}
_PLAIN = {adapted: part for part, adapted in _ADAPTED.items()}


Key = tuple[GraphPart, int]


def sizes_for(max_rows: int) -> tuple[int, ...]:
    """The sizes of an engine with so many rows at most: that number is one of them, unless it is above the largest."""
    return tuple(size for size in SIZES if size < max_rows) + ((max_rows,) if max_rows <= SIZES[-1] else ())


class DecodeGraphs:
    """The recorded steps, and which are wanted."""

    def __init__(
        self,
        device: Device,
        launch: Callable[[GraphPart, int], None],
        max_rows: int,
        *,
        is_on: bool,
        all_agree: Callable[[bool], bool] = bool,
    ) -> None:
        """launch: makes the launches of a part for so many rows. is_on False: nothing is recorded (enforce_eager).

        all_agree: whether all ranks of the model have recorded what this one has; what is used as a graph by one must be by all.
        """
        self.sizes = sizes_for(max_rows)
        self.is_on = is_on
        self.num_replays = 0
        self.num_launched = 0
        """Parts that were launched kernel by kernel."""
        self._device, self._launch, self._max_rows, self._all_agree = device, launch, max_rows, all_agree
        self._replays: dict[Key, Replay] = {}
        self._misses: dict[Key, int] = {}
        self._refused: set[Key] = set()
        """Could not be launched or captured when that was tried."""

    def __contains__(self, key: Key) -> bool:
        return key in self._replays

    @property
    def kinds(self) -> tuple[int, ...]:
        """Numbers of rows that between them take every kernel of a decode step, recorded or not: those are compiled for
        powers of two.
        """
        beyond = (min(2 * SIZES[-1] << i, self._max_rows) for i in range(self._max_rows.bit_length()))
        return self.sizes + tuple(dict.fromkeys(size for size in beyond if size > SIZES[-1]))

    def size_for(self, num_rows: int) -> int:
        """How many rows a step of so many is launched with."""
        at = bisect_left(self.sizes, num_rows)
        return self.sizes[at] if at < len(self.sizes) else num_rows

    def run(self, part: GraphPart, size: int) -> None:
        """Launch the part, as a graph if it is one."""
        key = (part, size)
        replay = self._replays.get(key)
        if replay is not None:
            self.num_replays += 1
            replay()
            return
        self.num_launched += 1
        self._launch(part, size)
        if self.is_on and size <= SIZES[-1] and key not in self._refused:
            misses = self._misses[key] = self._misses.get(key, 0) + 1
            if misses > MAX_MISSES:
                self._record(key)  # its kernels have just been launched: they are compiled

    def want(self, part: GraphPart, size: int) -> None:
        """Record this one when there is time."""
        key = (part, size)
        if self.is_on and key not in self._replays and key not in self._refused:
            self._misses.setdefault(key, 0)

    def next_wanted(self) -> Key | None:
        """What `record` should be called with next: what was missed most."""
        return max(self._misses, key=lambda key: self._misses[key]) if self._misses else None

    def statistics(self) -> dict[str, int]:
        return {
            "num_graphs": len(self._replays),
            "num_graphs_wanted": len(self._misses),
            "num_graphs_refused": len(self._refused),
            "num_graph_replays": self.num_replays,
            "num_parts_launched": self.num_launched,
        }

    def record(self, key: Key) -> None:
        """Between steps, with rows of no slot in place: they are launched once if that has never been done.

        Raises what the launch raises. If it is only the recording that fails, that is logged.
        """
        if not self._misses.pop(key, 0):
            self._refused.add(key)
            self._launch(*key)
            self._refused.discard(key)
        self._record(key)

    def _record(self, key: Key) -> None:
        self._misses.pop(key, None)
        replay: Replay | None = None
        part, size = key
        try:
            replay = self._device.capture(lambda: self._launch(*key))
        except Exception:  # it was launched just now: if something else is wrong as well, the next launch says so
            logger.exception("%d rows (%s) cannot be recorded as a graph: launched kernel by kernel", size, part.value)
        is_everywhere = self._all_agree(replay is not None)
        if replay is not None and is_everywhere:
            self._replays[key] = replay
        else:
            self._refused.add(key)
