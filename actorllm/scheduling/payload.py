"""`Payload`: what a step carries beside token ids, and how much of it fits into its messages.

A plan and a result are one message each. Log-probabilities (of prompts, by chunk; of sampled tokens, by row) make results
large, prompts that are given as embeddings make plans large; so both bound what a step may hold. Owns the counts of what is
there: prompts with embeddings among the requests alive, log-probabilities among those that run. Costs nothing while nobody
asks for either. Used by Scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from actorllm.embeds import MAX_STEP_BYTES, rows_between
from actorllm.messages import U8
from actorllm.rules import SamplingRules
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.sequence import Sequence

MAX_CHUNK_LOGPROBS = 1 << 16
"""Log-probabilities of one prompt in one step: a prompt that asks for more goes through in smaller chunks."""
MAX_ROW_LOGPROBS = 1 << 22
"""Of sampled tokens in one step. Who would exceed it is not admitted beside others: a result is one message."""


class Payload:
    """embedding_bytes: of each position of a prompt that is given as an embedding; 0: none is."""

    def __init__(self, embedding_bytes: int) -> None:
        self._embedding_bytes = embedding_bytes
        self.num_embedded = 0
        """Requests alive whose prompts have embeddings."""
        self._num_row_logprobs = 0
        """That a step returns when every running request samples."""

    def add(self, sequence: Sequence) -> bool:
        """A request has come alive. Returns whether its prompt has embeddings."""
        has_embeds = sequence.submit.prompt_embeds.size > 0
        self.num_embedded += has_embeds
        return has_embeds

    def discard(self, sequence: Sequence) -> None:
        """One whose prompt has embeddings has ended."""
        self.num_embedded -= 1

    def enter_slot(self, rules: SamplingRules) -> None:
        """A request with these got a slot."""
        self._num_row_logprobs += rules.num_logprobs + 1

    def leave_slot(self, rules: SamplingRules) -> None:
        """It left it."""
        self._num_row_logprobs -= rules.num_logprobs + 1

    def has_row_room(self, sequence: Sequence) -> bool:
        """Whether the log-probabilities of its tokens fit beside those of the others."""
        rules = sequence.rules
        if rules is None or not self._num_row_logprobs:
            return True
        return self._num_row_logprobs + rules.num_logprobs + 1 <= MAX_ROW_LOGPROBS

    def chunk(self, sequence: Sequence, size: int) -> int:
        """So much of a chunk that the log-probabilities it returns are not too many for one message."""
        rules = sequence.rules
        if rules is None or not sequence.wants_prompt_logprobs or sequence.is_whole:
            return size
        return min(size, max(1, MAX_CHUNK_LOGPROBS // (rules.num_prompt_logprobs + 1)))

    def embeds_room(self) -> int:
        """Positions of prompts with embeddings that one plan has room for."""
        return MAX_STEP_BYTES // self._embedding_bytes if self.num_embedded else 0

    def embeds_of(self, prefill: Iterable[tuple[Sequence, int]], batch: Batch) -> U8:
        """The rows of these chunks that have an embedding; `num_computed` counts the chunks already."""
        ends = [(sequence, int(batch.num_computed[sequence.slot]), size) for sequence, size in prefill]
        return np.concatenate([rows_between(s.submit, end - n, end, self._embedding_bytes) for s, end, n in ends])

    def check_integrity(self, alive: Iterable[Sequence]) -> None:
        """AssertionError unless these are the requests alive."""
        num_embedded = num_row_logprobs = 0
        for sequence in alive:
            num_embedded += sequence.submit.prompt_embeds.size > 0
            if sequence.slot >= 0 and sequence.rules is not None:
                num_row_logprobs += sequence.rules.num_logprobs + 1
        assert self.num_embedded == num_embedded, "count of prompts with embeddings"
        assert self._num_row_logprobs == num_row_logprobs, "count of log-probabilities"
