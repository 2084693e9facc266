"""`Stopping`: at which token a request ends, and which rows of a step have to be looked at for it.

Owns what the requests alive look out for together. That is how many of them end at each token id, and how many watch for
repetitions. The model's own ends of text count for all. A steady step pays one look into that column for all its rows. Only
rows that hit something are looked at one by one. Used by Scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.scheduling.batch import Rows
from actorllm.scheduling.sequence import Sequence
from actorllm.types.outputs import FinishReason

REPETITION_DETECTED = "repetition_detected"
"""The stop_reason beside finish_reason "repetition", as in vLLM."""

ALWAYS = 1 << 30
"""The count of an id for which the row of every request is looked at."""


class Stopping:
    """What the requests alive end at."""

    def __init__(self, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._num_stopping = self._without_requests()
        """How many requests alive end at this id."""
        self._num_ids = self._num_own = int(np.count_nonzero(self._num_stopping))
        """Ends that any row could meet, those of the model included; 0: no token is looked up."""
        self._num_watched = 0

    def _without_requests(self) -> I32:
        counts = np.zeros(self._vocab_size, np.int32)
        counts[[token for token in self._eos_ids if token < self._vocab_size]] = ALWAYS
        return counts

    def add(self, sequence: Sequence) -> bool:
        """A request has come alive. Returns whether it looks out for anything of its own."""
        self._num_watched += sequence.watch is not None
        self._count(sequence, 1)
        return sequence.watch is not None or bool(sequence.submit.stop_token_ids)

    def discard(self, sequence: Sequence) -> None:
        """It has ended."""
        self._num_watched -= sequence.watch is not None
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, by: int) -> None:
        for token in sequence.submit.stop_token_ids:
            if 0 <= token < self._vocab_size:
                self._num_stopping[token] += by
                self._num_ids += by

    def candidates(self, rows: Rows, tokens: I32, known: I32) -> list[int]:
        """Those of the rows that `end_of` has to be asked of; each got one token and knows so many now."""
        may_end = known >= rows.limits
        if self._num_ids:
            may_end |= self._num_stopping.take(tokens).astype(np.bool_)
        if self._num_watched:
            may_end |= _repeats(rows, tokens)
        found: list[int] = may_end.nonzero()[0].tolist()
        return found

    @property
    def is_watching(self) -> bool:
        """Some request looks out for repetitions, and is to be told of each of its tokens."""
        return self._num_watched > 0

    def candidates_at(self, tokens: I32, beyond: I32 | None, counts: I32) -> list[int]:
        """As `candidates`, of tokens of which a row may have several; none of the requests looks out for repetitions.

        counts: tokens of each row. beyond: how many more a row knows with all of them than its limit; None: no row reaches it.
        Returns places in `tokens`.
        """
        may_end = self._num_stopping.take(tokens)
        if beyond is not None and np.count_nonzero(beyond >= 0):
            place = np.arange(tokens.size) - (counts.cumsum() - counts).repeat(counts)  # of each token in its row
            may_end |= place >= (counts - 1 - beyond).repeat(counts)
        if not may_end.item(may_end.argmax()):  # nearly always, and known in half the time that their places take
            return []
        found: list[int] = may_end.nonzero()[0].tolist()
        return found

    def end_of(self, sequence: Sequence, token: int, num_outputs: int) -> tuple[FinishReason, int | str | None] | None:
        """Why a request ends with this token, its num_outputs-th, and the stop_reason; None: it goes on."""
        if token in sequence.stop_ids and num_outputs > sequence.submit.min_tokens:
            return "stop", None if token in sequence.silent_ids else token
        if sequence.submit.prompt.size + num_outputs >= sequence.limit:
            return "length", None
        if sequence.watch is not None and sequence.watch.is_repeating and num_outputs >= sequence.submit.min_tokens:
            return "repetition", REPETITION_DETECTED
        return None

    def check_integrity(self, alive: Iterable[Sequence]) -> None:
        """AssertionError unless this is what these requests look out for."""
        num_watched, expected = 0, self._without_requests()
        for sequence in alive:
            num_watched += sequence.watch is not None
            np.add.at(expected, [t for t in sequence.submit.stop_token_ids if t < self._vocab_size], 1)
        assert self._num_watched == num_watched, "count of watched requests"
        num_ids = self._num_own + sum(0 <= t < self._vocab_size for s in alive for t in s.submit.stop_token_ids)
        assert self._num_ids == num_ids, "count of ids to end at"
        assert (expected == self._num_stopping).all(), "counts of stop ids differ from the requests alive"


def _repeats(rows: Rows, tokens: I32) -> NDArray[np.bool_]:
    """Which of the rows are in a loop with this token; those that look out for it are told of it."""
    repeats = np.zeros(len(rows), np.bool_)
    for row, (sequence, token) in enumerate(zip(rows.sequences.tolist(), tokens.tolist(), strict=True)):
        if sequence.watch is not None:
            sequence.watch.push(token)
            repeats[row] = sequence.watch.is_repeating
    return repeats
