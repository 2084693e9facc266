"""`Speculator`: the drafts of each step of a worker.

The runner tells it of plans and of sampled tokens, and asks it for drafts before each step. The runner samples as always at the
position of every draft and stops at the first difference. Drafts therefore change how many tokens a step yields, and no token.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np

from actorllm.errors import is_failure
from actorllm.messages import I32, StepPlan
from actorllm.model.inputs import Drafts, PersistentBatch
from actorllm.model.speculation.histories import Histories
from actorllm.types.drafter import Speculation
from actorllm.types.speculation import make_drafter

logger = logging.getLogger(__name__)


class BatchDrafter(Protocol):
    """What drafts for all rows of a step at once, from the batch itself (`model.cpu.draft_model`)."""

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        """The drafts of each of these decode rows, at most `wanted` of each."""

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        """What became of the drafts of a step, by row."""


class Speculator:
    """One worker's drafter, and what it knows of every slot.

    Arguments:
        options: of the engine.
        vocab_size: of the model.
        drafter: of whole batches; None: the one that the options name, which is asked row by row.

    Raises ConfigError for a drafter that cannot be built.
    """

    def __init__(self, options: Speculation, vocab_size: int, drafter: BatchDrafter | None = None) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._batch_drafter = drafter
        self._drafter = make_drafter(options, vocab_size) if drafter is None else None
        self.histories = Histories(options.num_speculative_tokens)
        self.num_failures = 0
        """Calls of the drafter that raised."""

    def apply(self, plan: StepPlan, known_tokens: dict[int, I32]) -> None:
        """Slots that were freed, and new ones. known_tokens: of new slots, prompt and output."""
        for slot in plan.freed.tolist():
            self.histories.remove(slot)
        if plan.new_rows.size:
            for slot in plan.new["slot"].tolist():
                self.histories.add(slot, known_tokens[slot])

    def clear(self) -> None:
        """No request is there any more."""
        self.histories.clear()

    def store(self, slots: I32, tokens: I32) -> None:
        """What was sampled for these slots, one token each."""
        self.histories.store(slots, tokens)

    def draft(self, batch: PersistentBatch, room: I32, most: int) -> Drafts | None:
        """Drafts for some of the decode rows of the batch; None: for none of them.

        Arguments:
            room: how many drafts each row has room for, [num_rows]; 0 or less: none.
            most: how many any row may have.
        """
        slots = batch.decode_slots
        wanted = np.zeros(len(slots), np.int32)
        for row, (slot, space) in enumerate(zip(slots.tolist(), room.tolist(), strict=True)):
            history = self.histories.of(slot)
            if history is not None and not history.rest:
                wanted[row] = max(0, min(most, space, history.length))
        rows = np.flatnonzero(wanted)
        if not rows.size:
            return None
        if self._batch_drafter is not None:
            found = self._batch_drafter.draft(batch, self.histories, slots[rows], wanted[rows])
        else:
            found = [
                self._ask(slot, number)
                for slot, number in zip(slots[rows].tolist(), wanted[rows].tolist(), strict=True)
            ]
        counts = np.zeros(len(slots), np.int32)
        counts[rows] = [len(drafted) for drafted in found]
        tokens = [token for drafted in found for token in drafted]
        return Drafts(counts, np.array(tokens, np.int32)) if tokens else None

    def _ask(self, slot: int, wanted: int) -> list[int]:
        """Usable drafts: at most `wanted`, all within the vocabulary."""
        history = self.histories.of(slot)
        assert history is not None
        assert self._drafter is not None
        tokens = history.tokens.view()
        tokens.flags.writeable = False
        try:
            drafted = [int(token) for token, _ in zip(self._drafter.draft(tokens, wanted), range(wanted), strict=False)]
        except BaseException as error:  # of a drafter of the application: a guess that is not made costs nothing
            if not is_failure(error):
                raise
            self.num_failures += 1
            if self.num_failures == 1:
                logger.exception("the drafter failed; its rows are computed without drafts", exc_info=error)
            return []
        wrong = next((i for i, token in enumerate(drafted) if not 0 <= token < self._vocab_size), len(drafted))
        return drafted[:wrong]

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        """What became of the drafts of a step, by row."""
        if self._batch_drafter is not None:
            self._batch_drafter.observe(slots, num_drafted, num_accepted)
        columns = zip(slots.tolist(), num_drafted.tolist(), num_accepted.tolist(), strict=True)
        for slot, drafted, accepted in columns:
            history = self.histories.of(slot)
            if drafted and history is not None:
                history.observe(drafted, accepted, self._options.num_speculative_tokens)
