"""`Promises`: the objectives of many requests as columns, one row each; what judges whole runs works on them.

A workload whose classes say what is promised needs none of its own: its rows are made of the classes. In a trace every
request may be promised something else, and its class is still what it is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64
from actorllm.types.objective import SLO, RequestClass


@dataclass(frozen=True, slots=True, eq=False)
class Promises:
    """Seconds, as in `SLO`; infinity where nothing is promised."""

    ttft: F64
    tpot: F64
    e2e: F64
    ttft_per_prompt_token: F64

    def __len__(self) -> int:
        return self.ttft.size

    @classmethod
    def of(cls, slos: Iterable[SLO | None]) -> Promises:
        """One row for each."""
        rows = [(math.inf, math.inf, math.inf, 0.0) if slo is None else _row(slo) for slo in slos]
        return cls(*np.array(rows, np.float64).reshape(len(rows), 4).T.copy())

    @classmethod
    def of_classes(cls, classes: Sequence[RequestClass], class_ids: NDArray[np.integer[Any]]) -> Promises:
        """Every request is promised what its class is."""
        return cls.of(kind.slo for kind in classes).select(class_ids)

    def select(self, rows: NDArray[Any]) -> Promises:
        return Promises(self.ttft[rows], self.tpot[rows], self.e2e[rows], self.ttft_per_prompt_token[rows])

    @property
    def made(self) -> NDArray[np.bool_]:
        """Which requests are promised anything."""
        found: NDArray[np.bool_] = np.isfinite(self.ttft) | np.isfinite(self.tpot) | np.isfinite(self.e2e)
        return found

    def slo(self, row: int) -> SLO | None:
        limits = (float(column[row]) for column in (self.ttft, self.tpot, self.e2e))
        ttft, tpot, e2e = (None if value == math.inf else value for value in limits)
        per_prompt_token = float(self.ttft_per_prompt_token[row])
        if ttft is None and tpot is None and e2e is None and not per_prompt_token:
            return None
        return SLO(ttft, tpot, e2e, per_prompt_token)

    def scaled(self, factor: float) -> Promises:
        """All of it so many times as loose."""
        return Promises(self.ttft * factor, self.tpot * factor, self.e2e * factor, self.ttft_per_prompt_token * factor)

    def ttft_limit(self, num_prompt: NDArray[np.integer[Any]]) -> F64:
        """Seconds from arrival to the first token of each request."""
        return self.ttft + self.ttft_per_prompt_token * num_prompt


def _row(slo: SLO) -> tuple[float, float, float, float]:
    ttft, tpot, e2e = (math.inf if value is None else value for value in (slo.ttft, slo.tpot, slo.e2e))
    return ttft, tpot, e2e, slo.ttft_per_prompt_token
