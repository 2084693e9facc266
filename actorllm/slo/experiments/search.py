"""Bisection to the highest rate at which a target is attained.

Rates are the rungs of a ladder, each a few per cent above the one before. So all searches of a variant ask for the same rates
and share what was simulated, also with an earlier run. They differ in target (99 %, 90 %, 50 %), in worst class or overall, and
in the reading.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from actorllm.errors import ConfigError

FIRST_STRIDE = 8


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rung 0 is `start`; one rung is `step` above the one before."""

    start: float
    step: float = 0.03
    max_ratio: float = 16.0
    """No rate is further than this from the start, up or down."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start > 0):
            raise ConfigError(f"a search must start at a positive rate, not at {self.start!r}")
        if not 0.001 <= self.step <= 1:
            raise ConfigError(f"step={self.step!r} of a search must be between 0.001 and 1")

    def rate(self, rung: int) -> float:
        return float(f"{self.start * (1 + self.step) ** rung:.6g}")

    @property
    def last(self) -> int:
        return math.floor(math.log(self.max_ratio) / math.log1p(self.step))


def search(ladder: Ladder, target: float, known: Mapping[int, float]) -> Generator[int, float, tuple[int | None, int]]:
    """Ask for rungs, get what each attains, and return (the highest one known to reach the target, the one that does not).

    The two are next to each other. (None, lowest): not even the lowest rung does; (last, last): the highest one does, too.
    known: rungs that were asked for before, kept up to date by the caller that drives this.
    """
    high = min((rung for rung, value in known.items() if value < target), default=None)
    low = max((r for r, value in known.items() if value >= target and (high is None or r < high)), default=None)
    stride = FIRST_STRIDE
    # Nothing is known: begin with rung 0, the start of the ladder.
    if low is None and high is None:
        if (yield 0) >= target:
            low = 0
        else:
            high = 0
    # Strides that double find a bracket in few steps, upwards or downwards, and end at the ends of the ladder.
    while high is None:
        assert low is not None
        rung = min(low + stride, ladder.last)
        if rung == low:
            return low, low
        if (yield rung) >= target:
            low = rung
        else:
            high = rung
        stride *= 2
    while low is None:
        rung = max(high - stride, -ladder.last)
        if rung == high:
            return None, high
        if (yield rung) >= target:
            low = rung
        else:
            high = rung
        stride *= 2
    # Then bisection within the bracket.
    while high - low > 1:
        middle = (low + high) // 2
        if (yield middle) >= target:
            low = middle
        else:
            high = middle
    return low, high
