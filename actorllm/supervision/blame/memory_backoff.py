"""`MemoryBackoff`: the limits of a step after one ran out of memory.

The next steps hold half of what was too much, in requests and in tokens. The limits double after many good steps, until
the engine's own limits hold again. Each further failure doubles the number of good steps that this takes. Pure
counting; owned by the scheduler.
"""

from __future__ import annotations

STEPS_BEFORE_MORE = 64
MAX_DOUBLINGS = 6
SMALL_CHUNK = 64
"""Tokens of a prompt for which there is no memory even alone: less is not tried."""


class MemoryBackoff:
    """None of its limits holds before the first `shrink`."""

    def __init__(self, max_seqs: int, max_tokens: int) -> None:
        self.max_seqs = max_seqs
        """Most requests that may run."""
        self.max_tokens = max_tokens
        """Most tokens of a step."""
        self.num_failures = 0
        self._most = max_seqs, max_tokens
        self._num_good = 0

    @property
    def is_active(self) -> bool:
        return (self.max_seqs, self.max_tokens) != self._most

    def shrink(self, num_seqs: int, num_tokens: int) -> None:
        """A step with so many requests and tokens was too much."""
        self.num_failures += 1
        self._num_good = 0
        self.max_seqs = max(1, min(self.max_seqs, num_seqs // 2))
        self.max_tokens = max(self.max_seqs, min(self.max_tokens, num_tokens // 2))

    def on_good_step(self) -> None:
        """A step went through."""
        self._num_good += 1
        if self._num_good >= STEPS_BEFORE_MORE << min(self.num_failures - 1, MAX_DOUBLINGS):
            self._num_good = 0
            self.max_seqs = min(2 * self.max_seqs, self._most[0])
            self.max_tokens = min(2 * self.max_tokens, self._most[1])

    def lift(self) -> None:
        """No limit of its own any more."""
        self.max_seqs, self.max_tokens = self._most
