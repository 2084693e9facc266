"""`ClockOffset`: what the clock of another machine shows minus what this one's shows, from heartbeats. Pure.

A heartbeat that answers another one bounds the offset: the answer was made after the question came, and before it was back. The
narrowest of the last bounds counts, as in NTP. Bounds that exclude each other tell that a clock has jumped (a machine was
suspended), and those of before are forgotten.
"""

from __future__ import annotations

import math
from collections import deque

NUM_SAMPLES = 16
SLACK_S = 0.001
"""How far clocks may drift apart between the samples that are kept."""


class ClockOffset:
    """See the module docstring. All times in seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=NUM_SAMPLES)
        self.seconds = 0.0
        """What the other clock shows minus what this one shows."""
        self.error_s = float("inf")
        """How wrong that may be; infinity: nothing is known."""

    def observe(self, asked: float, received: float, answered: float, back: float) -> None:
        """Arguments: when this side asked and had the answer, by its clock; when the other one had the question and answered, by
        its own.
        """
        half_trip_s = (back - asked - (answered - received)) / 2
        offset_s = (received - asked + answered - back) / 2
        if not (half_trip_s >= 0 and math.isfinite(offset_s)):
            return  # no two clocks tell this; a peer with a defect may
        if self._samples and abs(offset_s - self.seconds) > self.error_s + half_trip_s + SLACK_S:
            self._samples.clear()
        self._samples.append((half_trip_s, offset_s))
        self.error_s, self.seconds = min(self._samples)
