"""`StageClocks`: when each stage of a simulated pipeline computes a step, and how long it waits.

A step takes its share of the model's seconds on every stage, on one after the other. A stage computes the steps in their order, one
at a time. So it waits for the stage before it, or for a plan. What it waits between its first step and its last one are *bubbles*.
Used by `simulator.ModelledWorker`; the scheduler there is the real one, with a lane for each stage. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actorllm.errors import ConfigError


class StageClocks:
    """Of one replica."""

    def __init__(self, shares: Sequence[float], gap_s: float = 0.0, hop_s: float = 0.0) -> None:
        """shares: of a step's seconds, by stage; together 1. gap_s: between two steps of a stage. hop_s: from a stage to the next.

        Raises ConfigError for shares that are no such.
        """
        if len(shares) < 2 or min(shares) <= 0 or not math.isclose(sum(shares), 1.0, rel_tol=1e-6):
            raise ConfigError(f"stages={tuple(shares)!r} must be the shares of two stages or more, which add up to 1")
        self._shares, self._gap_s, self._hop_s = tuple(shares), gap_s, hop_s
        self._free_at = [-math.inf] * len(shares)
        self._began = [math.inf] * len(shares)
        self._busy = [0.0] * len(shares)

    def place(self, ready: float, seconds: float) -> tuple[float, float]:
        """A step that takes so long on all stages together, and may begin when it is ready: when it is on the last stage.

        Returns its start and its end there.
        """
        start = end = ready
        for stage, share in enumerate(self._shares):
            start = max(end, self._free_at[stage] + self._gap_s)
            end = self._free_at[stage] = start + share * seconds
            self._began[stage] = min(self._began[stage], start)
            self._busy[stage] += share * seconds
            if stage + 1 < len(self._shares):
                end += self._hop_s
        return start, end

    @property
    def bubbles(self) -> tuple[float, ...]:
        """By stage, the share of the time from its first step to its last in which it computed nothing."""
        spans = [free - began for free, began in zip(self._free_at, self._began, strict=True)]
        return tuple(1 - busy / span if span > 0 else 0.0 for busy, span in zip(self._busy, spans, strict=True))
