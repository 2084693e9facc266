"""`StepBudget`: how long a step of a worker may take before it counts as stuck, from what steps of its size took so far. Pure."""

from __future__ import annotations

MIN_BUDGET_S = 30.0
"""No step is stuck before, however fast others were: the machine may have something better to do for a while."""
NEW_BUDGET_S = 300.0
"""Of a step larger than any before: memory is touched and kernels are made for the first time."""
MULTIPLE = 20.0
"""So many times what steps of this size have taken."""
FADING = 0.98
"""What is left of a slow step with each faster one after it."""


class StepBudget:
    """How long the steps of a worker may take. Steps are of one size when their tokens have as many binary digits."""

    def __init__(self, fixed_s: float | None = None) -> None:
        """fixed_s: for every step; None: learnt."""
        self._fixed_s = fixed_s
        self._seconds: list[float] = []  # by size: the slowest step, fading; 0: none yet

    def of(self, num_tokens: int) -> float:
        """For a step that is about to begin, in seconds."""
        if self._fixed_s is not None:
            return self._fixed_s
        size = num_tokens.bit_length()
        seconds = self._seconds[size] if size < len(self._seconds) else 0.0
        if seconds:
            return max(MIN_BUDGET_S, MULTIPLE * seconds)
        largest = len(self._seconds) - 1
        if size > largest >= 0:
            seconds = self._seconds[largest] * 2.0 ** (size - largest)
        return max(NEW_BUDGET_S, MULTIPLE * seconds)

    def observe(self, num_tokens: int, seconds: float, budget_s: float) -> None:
        """A step is through. budget_s: what `of` gave it."""
        size = num_tokens.bit_length()
        known = self._seconds
        if size >= len(known):
            known += [0.0] * (size + 1 - len(known))
        if seconds < budget_s:  # else it was not computing: this process was stopped meanwhile
            known[size] = max(seconds, FADING * known[size])
