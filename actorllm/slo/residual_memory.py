"""`SlowUniforms`: random numbers whose neighbours are alike, so that simulated steps have slow periods as measured ones do.

Uniform as those of a generator, so the distribution of residuals is the same. Their normal scores are a first-order
autoregressive process. Pure.
"""

from __future__ import annotations

import math

import numpy as np

from actorllm.messages import F64


class SlowUniforms:
    """memory: the correlation of the normal scores of two neighbours, from 0 to below 1."""

    def __init__(self, rng: np.random.Generator, memory: float) -> None:
        self._rng = rng
        self._memory = memory
        self._last = float(rng.standard_normal())

    def random(self, num: int) -> F64:
        """The next ones: [num]."""
        memory, fresh, last = self._memory, math.sqrt(1 - self._memory**2), self._last
        found = []
        for drawn in self._rng.standard_normal(num).tolist():
            last = memory * last + fresh * drawn
            found.append(0.5 * math.erfc(-last / math.sqrt(2)))
        self._last = last
        return np.array(found)
