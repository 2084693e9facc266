"""`RepetitionWatch`: notices when the output of a request has become a loop.

The output loops when it ends with `count` copies in a row of the same p tokens, for some p between the limits. Then each of the
last p * (count - 1) tokens equals the one p before. Such runs can be counted as the tokens come: a token costs one pass over the
pattern sizes, however long the output is. Lives as long as its sequence, through preemptions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32

NO_TOKEN = -1


class RepetitionWatch:
    """Of one request. is_repeating: as of the last token pushed."""

    __slots__ = ("_is_enough", "_needed", "_recent", "_runs", "is_repeating")

    def __init__(self, largest: int, smallest: int, count: int, max_tokens: int, output: I32) -> None:
        """Patterns that could not come `count` times within max_tokens are not looked for. output: tokens so far."""
        size = max(0, min(largest, max_tokens // count))
        self._recent: I32 = np.full(size, NO_TOKEN, np.int32)  # [p - 1] is the token p before the next one
        self._runs: NDArray[np.int64] = np.zeros(size, np.int64)
        self._needed = np.arange(1, size + 1, dtype=np.int64) * (count - 1)
        self._needed[: smallest - 1] = np.iinfo(np.int64).max
        self._is_enough: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.is_repeating = False
        for token in output.tolist():
            self.push(token)

    def push(self, token: int) -> None:
        """The next token of the output."""
        recent, runs = self._recent, self._runs
        if not recent.size:
            return
        np.equal(recent, token, out=self._is_enough)
        runs += 1
        runs *= self._is_enough
        recent[1:] = recent[:-1]
        recent[0] = token
        np.greater_equal(runs, self._needed, out=self._is_enough)
        self.is_repeating = bool(self._is_enough.any())
