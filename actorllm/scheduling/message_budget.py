"""`MessageBudget`: what a step carries beside token ids, and how much of it fits into its messages.

A plan and a result are one message each, and of either two may be on their way. Log-probabilities make results large: those of
prompts by chunk, those of sampled tokens by row. Prompts that are given as embeddings make plans large. So do new rows, with
all their known tokens and logit rules. So all of these bound what a step may hold. Owns three counts: requests alive whose
prompts have embeddings, log-probabilities of those that run, and bytes of the plan that is being made. Used by Scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from actorllm.messages import U8
from actorllm.messages.embeds import MAX_STEP_BYTES, rows_between
from actorllm.messages.logit_rules import SamplingRules
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.sequence import Sequence

MAX_CHUNK_LOGPROBS = 1 << 16
"""Log-probabilities of one prompt in one step: a prompt that asks for more goes through in smaller chunks."""
MAX_PROMPT_LOGPROBS = 1 << 19
"""Of all prompts of one step: 4 MiB of its result. The others wait for the next step; a prompt has at least one token."""
MAX_ROW_LOGPROBS = 1 << 19
"""Of all sampled tokens of one step, likewise. A request that would exceed it is not admitted beside others."""

MAX_NEW_BYTES = 2 << 20
"""Of the new rows of one plan. A request that would exceed it beside others is admitted by a later one."""


class MessageBudget:
    """embedding_bytes: of each position of a prompt that is given as an embedding; 0: none is."""

    def __init__(self, embedding_bytes: int) -> None:
        self._embedding_bytes = embedding_bytes
        self.num_embedded = 0
        """Requests alive whose prompts have embeddings."""
        self._num_row_logprobs = 0
        """That a step returns when every running request samples."""
        self._num_new_bytes = 0

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

    def chunk(self, rules: SamplingRules, size: int, num_told: int) -> int:
        """So much of a chunk of a prompt that tells log-probabilities, in a step in which other prompts tell num_told.

        0: none of it goes through in this step.
        """
        room = MAX_PROMPT_LOGPROBS - num_told
        if room <= 0:
            return 0
        return min(size, max(1, min(MAX_CHUNK_LOGPROBS, room) // (rules.num_prompt_logprobs + 1)))

    def begin_plan(self) -> None:
        """The next plan has no new row yet."""
        self._num_new_bytes = 0

    def has_plan_room(self, sequence: Sequence) -> bool:
        """Whether a request fits the plan as a new row, beside those that it has."""
        return not self._num_new_bytes or self._num_new_bytes + _row_bytes(sequence) <= MAX_NEW_BYTES

    def take(self, sequence: Sequence) -> bool:
        """Make a request one of the new rows of the plan, if it has room in it and in the result."""
        num_bytes = _row_bytes(sequence) + self._num_new_bytes
        if num_bytes > MAX_NEW_BYTES and self._num_new_bytes:
            return False
        if sequence.rules is not None and not self.has_row_room(sequence):
            return False
        self._num_new_bytes = num_bytes
        return True

    def add_to_plan(self, sequence: Sequence) -> None:
        """It is one of them."""
        self._num_new_bytes += _row_bytes(sequence)

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


def _row_bytes(sequence: Sequence) -> int:
    """Of a new row in a plan, but for what all of them have."""
    known = 4 * sequence.known.size + sequence.submit.processor_params.size
    return known if sequence.rules is None else known + sequence.rules.num_bytes
