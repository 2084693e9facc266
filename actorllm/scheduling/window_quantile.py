"""`WindowQuantile`: a quantile of the positive values of the last seconds, in bounded memory however many come. Pure.

Values that differ by less than 2 % are counted together, as the least of them. The window is forgotten in parts, a few seconds
each. While nothing comes, what came last is remembered.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

NUM_PARTS = 64
"""Of a window."""
LEAST, MOST = 1e-4, 1e6
"""Of smaller and of larger values only the least is told apart."""
STEP = math.log(1.02)


class WindowPart(NamedTuple):
    """What came in one part of the window: by size, how many and the least of them."""

    number: int
    counts: dict[int, tuple[int, float]]


class WindowQuantile:
    """See the module docstring. window_s: how long a value is remembered, in seconds."""

    def __init__(self, window_s: float) -> None:
        self._part_s = window_s / NUM_PARTS
        self._parts: deque[WindowPart] = deque()

    def note(self, value: float, at: float) -> None:
        """A value came; it may be infinite. at: in seconds."""
        number = math.floor(at / self._part_s)
        parts = self._parts
        if not parts or parts[-1].number < number:
            parts.append(WindowPart(number, {}))
            while parts[0].number <= number - NUM_PARTS:
                parts.popleft()
        size = math.floor(math.log(min(max(value, LEAST), MOST)) / STEP)
        count, least = parts[-1].counts.get(size, (0, math.inf))
        parts[-1].counts[size] = count + 1, min(least, value)

    def at(self, share: float, default: float) -> float:
        """A value that no more than this share of all are below. default: of nothing."""
        total: dict[int, tuple[int, float]] = {}
        for part in self._parts:
            for size, (count, least) in part.counts.items():
                known, lower = total.get(size, (0, math.inf))
                total[size] = known + count, min(lower, least)
        left = int(share * (sum(count for count, _ in total.values()) - 1))
        for size in sorted(total):
            count, least = total[size]
            if count > left:
                return least
            left -= count
        return default

    @property
    def num_counted(self) -> int:
        """How many counts there are, which is what takes memory."""
        return sum(len(part.counts) for part in self._parts)
