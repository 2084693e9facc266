"""`TableModel`: step times by kind of step, each a sum of features times a table that is interpolated.

    decode   steps without prompts: the table is by decode rows and by the mean context of a row
    prompt   steps with prompts: by prompt tokens and by decode rows

One plane through both kinds is wrong for both. Each kind has its own coefficients. Its table has what no sum can say: where a
kernel changes, where a graph ends, where a size fills the machine badly. Between nodes of the table logarithms are
interpolated, beyond its edges the edge holds. A kind that was never measured takes what the other one says. Seconds. Pure.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from actorllm.errors import ConfigError
from actorllm.messages import F64

NUM_COEFFICIENTS = 6


@dataclass(frozen=True, slots=True)
class KindTable:
    """Of one kind of step."""

    coefficients: tuple[float, ...]
    """Of `cost_model.FEATURES`."""
    sizes: tuple[float, ...] = (1.0,)
    """Nodes: decode rows, or prompt tokens; ascending."""
    columns: tuple[float, ...] = (1.0,)
    """Nodes of the second axis: mean context of a decode row, or decode rows; ascending."""
    factors: tuple[tuple[float, ...], ...] = ((1.0,),)
    """By size, then by the second axis: measured / sum of features."""

    def __post_init__(self) -> None:
        if len(self.coefficients) != NUM_COEFFICIENTS or not all(map(math.isfinite, self.coefficients)):
            raise ConfigError(
                f"a step table needs {NUM_COEFFICIENTS} finite coefficients, not {self.coefficients!r:.80}"
            )
        for name, axis in (("sizes", self.sizes), ("columns", self.columns)):
            if not axis or any(not x >= 0 for x in axis) or any(a >= b for a, b in itertools.pairwise(axis)):
                raise ConfigError(f"{name}={axis!r:.80} of a step table must be numbers that ascend")
        if len(self.factors) != len(self.sizes) or any(len(row) != len(self.columns) for row in self.factors):
            raise ConfigError(
                f"a step table of {len(self.sizes)} sizes needs as many rows of {len(self.columns)} factors"
            )
        if any(not (math.isfinite(x) and x > 0) for row in self.factors for x in row):
            raise ConfigError("the factors of a step table must be positive")

    def factor(self, size: float, second: float) -> float:
        i, x = _place(self.sizes, size)
        j, y = _place(self.columns, second)
        rows, last = self.factors, len(self.columns) - 1
        low = _between(rows[i], j, y, last)
        return low if not x else low + x * (_between(rows[i + 1], j, y, last) - low)


def _place(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The node at or below a value, and how far it is to the next one, by logarithms."""
    at = bisect_right(axis, value) - 1
    if at < 0:
        return 0, 0.0
    if at >= len(axis) - 1:
        return len(axis) - 1, 0.0
    return at, math.log((1 + value) / (1 + axis[at])) / math.log((1 + axis[at + 1]) / (1 + axis[at]))


def _between(row: tuple[float, ...], at: int, share: float, last: int) -> float:
    return row[at] if not share or at == last else row[at] + share * (row[at + 1] - row[at])


@dataclass(frozen=True, slots=True)
class TableModel:
    """A `StepModel`. See the module docstring."""

    decode: KindTable | None
    prompt: KindTable | None
    name: str = "table"
    floor_s: float = 1e-6
    """No step takes less."""
    gap_s: float = 0.0
    launch_s: float = 0.0
    residuals: tuple[float, ...] = ()
    submit_s: float = 0.0
    deliver_s: float = 0.0

    def __post_init__(self) -> None:
        if self.decode is None and self.prompt is None:
            raise ConfigError("a table model needs the table of at least one kind of step: decode or prompt")

    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float:
        is_decode = not p
        table = self.decode if is_decode else self.prompt
        if table is None:
            is_decode = not is_decode
            table = self.decode if is_decode else self.prompt
        assert table is not None
        c0, c1, c2, c3, c4, c5 = table.coefficients
        found = c0 + c1 * p + c2 * d + c3 * decode_context + c4 * prefill_context + c5 * prefill_pairs
        found *= table.factor(d, decode_context / d if d else 0.0) if is_decode else table.factor(p, d)
        return found if found > self.floor_s else self.floor_s

    def decode_run(self, d: int, context: int, steps: int) -> F64:
        return np.array([self.seconds(0, d, context + d * step) for step in range(steps)])
